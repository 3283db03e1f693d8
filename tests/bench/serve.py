"""From the bare mlx loop to the client, and beside a peer: `python -m tests.bench.serve [MODEL_DIR]`.

In one run, on the same weights and with the same BLAS, interleaved round by round, medians of --rounds:

    bare        the shortest mlx loop over our graph (the limit)
    engine      our engine in its own process, no wire
    worker      our worker, asked on its Unix socket
    mlxd        through the parent, over HTTP
    mlx_lm      mlx_lm.server, in an environment of its own that the benchmark makes

decode tok/s, time to first token (short prompt, about 1,000 tokens, the same prompt again), start to first answer,
peak memory; then what the public formats cost, and the wire alone with a paced fake worker. Without MODEL_DIR the
starter model is fetched.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from parent.config import load_settings
from parent.workers.blas import worker_env
from tests.bench.asking import Row, Server, ask_http, ask_worker, free_port, running
from tests.bench.protocols import print_rows
from tests.process.harness import write_model

ROOT = Path(__file__).resolve().parents[2]
PEER = "mlx-lm==0.32.2"
STORY = "Write a long story about a lighthouse keeper, a storm and a lost ship."


def main() -> None:
    """Run everything, print a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a model directory (default: the starter)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="leave mlx_lm.server out")
    parser.add_argument("--no-wire", action="store_true", help="leave the paced fake worker out")
    parser.add_argument("--quick", action="store_true", help="one short round, without peer and wire")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens, options.starts = 1, 16, 1
        options.no_peer = options.no_wire = True
    data = ROOT / ".data"
    environment, blas = worker_env(load_settings({"data_dir": str(data)}, {}, home=ROOT).settings)
    model = (options.model or starter(data)).resolve()
    ways = ["bare", "engine", "worker", "mlxd"] + ([] if options.no_peer else ["mlx_lm"])
    report: dict[str, Any] = {"machine": machine(), "blas": blas, "model": model.name, "ways": {}}
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        peer = None if options.no_peer else peer_python(data)
        report["start_to_first_answer_s"] = measure_starts(
            model, Path(folder), environment, peer, options.starts
        )
        with contextlib.ExitStack() as stack:
            local = stack.enter_context(in_process(model, environment))
            ours = stack.enter_context(mlxd(model, Path(folder) / "data"))
            theirs = stack.enter_context(mlx_lm(model, peer, environment)) if peer else None
            asks = askers(local, ours, theirs, model)
            report["ways"] = measure_ways({way: asks[way] for way in ways}, options.rounds, options.tokens)
            report["memory"] = memory(ours.port, theirs)
    print_report(report)
    report["formats"] = json.loads(run_module("tests.bench.protocols", str(model)).splitlines()[-1])
    print_rows(report["formats"], 1e6 / report["ways"]["bare"]["decode_tps"])
    if not options.no_wire:
        report["wire"] = json.loads(run_module("tests.bench.wire").splitlines()[-1])
        report["paced"] = measure_paced(options.rounds)
        print_wire(report)
    print(json.dumps(report))


# ---------------------------------------------------------------- what is measured


Ask = Callable[[str, int], Row]
"""(prompt, tokens) -> {"ttft_s", "decode_tps"}"""


def measure_ways(asks: dict[str, Ask], rounds: int, tokens: int) -> dict[str, Row]:
    """Each way in turn, round by round, so that a busy moment of the machine hits all of them."""
    found: dict[str, dict[str, list[float]]] = {way: {} for way in asks}
    for way, ask in asks.items():
        ask(f"warm up {way}", 4)
    for number in range(rounds):
        for way, ask in asks.items():
            seen = found[way]
            unique = uuid.uuid4().hex[:6]
            row = ask(f"{unique} {number}. {STORY}", tokens)
            seen.setdefault("decode_tps", []).append(row["decode_tps"])
            seen.setdefault("ttft_short_s", []).append(row["ttft_s"])
            long = f"{unique}. " + "The keeper counted the waves and wrote each one down. " * 88
            seen.setdefault("ttft_1k_s", []).append(ask(long, 2)["ttft_s"])
            if way not in ("bare", "engine"):  # they keep no prefixes here
                seen.setdefault("ttft_repeat_s", []).append(ask(long, 2)["ttft_s"])
    return {way: {k: statistics.median(v) for k, v in seen.items()} for way, seen in found.items()}


def measure_starts(
    model: Path, folder: Path, environment: dict[str, str], peer: Path | None, count: int
) -> dict[str, float]:
    """From the start of the process to a first answer of one token, asked as soon as somebody listens.

    One start of each is not counted: it warms the file cache, and ours looks for a BLAS at its very first.
    """
    seen: dict[str, list[float]] = {"mlxd": []} | ({"mlx_lm": []} if peer else {})
    for number in range(count + 1):
        for way, times in seen.items():
            began = time.perf_counter()
            server = mlxd(model, folder) if way == "mlxd" else mlx_lm(model, peer, environment)
            with server as running:
                ask_http(running.port, running.model, "What is the capital of France?", 1)
                if number:
                    times.append(time.perf_counter() - began)
    return {way: statistics.median(values) for way, values in seen.items()}


def measure_paced(rounds: int, ms: float = 20.0, tokens: int = 100) -> dict[str, float]:
    """Tokens a second through the parent over tokens a second from the worker, when a token takes 20 ms."""
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        script = {"ms_per_token": ms, "tokens": tokens, "heartbeat_ms": 1000}
        write_model(Path(folder), script, ("fake",))
        port = free_port()
        settings = json.dumps({"data_dir": str(Path(folder) / "data"), "port": port})
        command = [sys.executable, "-m", "tests.process.serve_fake", settings, folder]
        with running(command, {"PYTHONPATH": str(ROOT)}, port, "fake") as server:
            ask_http(port, "fake", "warm up", 4)
            for _ in range(rounds):
                direct = asyncio.run(ask_worker(port, STORY, tokens))
                through = ask_http(server.port, "fake", STORY, tokens)
                shares.append(through["decode_tps"] / direct["decode_tps"])
    return {"ratio": statistics.median(shares), "ms_per_token": ms}


def memory(port: int, theirs: "Server | None") -> dict[str, float]:
    """Peak resident megabytes of the parent, its worker and the peer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/engine")
        worker = json.loads(connection.getresponse().read())["pid"]
    parent = psutil.Process(worker).ppid()
    found = {"parent_mb": peak_mb(parent), "worker_mb": peak_mb(worker)}
    return found | ({"mlx_lm_mb": peak_mb(theirs.pid)} if theirs else {})


def peak_mb(pid: int) -> float:
    """VmHWM where the system tells it, else the present size."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return psutil.Process(pid).memory_info().rss / 1e6


# ---------------------------------------------------------------- the ways


def askers(local: Ask, ours: Server, theirs: Server | None, model: Path) -> dict[str, Ask]:
    """Every way behind one call."""
    from worker.text.template import load_template
    from worker.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    template = load_template(model, tokenizer.config, tokenizer.special)

    def ids(prompt: str) -> list[int]:
        return tokenizer.encode_rendered(template.render([{"role": "user", "content": prompt}]))

    def direct(prompt: str, tokens: int) -> Row:
        return asyncio.run(ask_worker(ours.port, prompt, tokens))

    ways: dict[str, Ask] = {
        "bare": lambda prompt, tokens: local("bare", ids(prompt), tokens),
        "engine": lambda prompt, tokens: local("engine", ids(prompt), tokens),
        "worker": direct,
        "mlxd": lambda prompt, tokens: ask_http(ours.port, ours.model, prompt, tokens),
    }
    if theirs:
        ways["mlx_lm"] = lambda prompt, tokens: ask_http(theirs.port, theirs.model, prompt, tokens)
    return ways


@contextlib.contextmanager
def in_process(model: Path, environment: dict[str, str]) -> Iterator[Callable[[str, list[int], int], Row]]:
    """`tests.bench.inprocess`, asked over its standard input."""
    command = [sys.executable, "-m", "tests.bench.inprocess", str(model)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()

        def ask(way: str, ids: list[int], tokens: int) -> Row:
            process.stdin.write(json.dumps({"way": way, "ids": ids, "tokens": tokens}).encode() + b"\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def mlxd(model: Path, data: Path) -> contextlib.AbstractContextManager[Server]:
    """Our server; the BLAS is its own business."""
    port = free_port()
    command = [sys.executable, "-m", "parent", "serve", str(model), "--no-open", "--port", str(port)]
    return running(command, {"MLXD_DATA_DIR": str(data), "PYTHONPATH": str(ROOT)}, port, model.name)


def mlx_lm(
    model: Path, peer: Path | None, environment: dict[str, str]
) -> contextlib.AbstractContextManager[Server]:
    """The peer, with the same BLAS."""
    port = free_port()
    command = [str(peer), "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    return running(command, {**environment, "HF_HUB_OFFLINE": "1"}, port, str(model))


def peer_python(data: Path) -> Path:
    """The interpreter of the peer's environment, made on first use."""
    folder = data / "bench-peer"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        mlx = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER, mlx], check=True)
        (folder / "ready").write_text(PEER)
    return python


def starter(data: Path) -> Path:
    """The starter model, fetched once."""
    environment = {**os.environ, "MLXD_DATA_DIR": str(data)}
    subprocess.run([sys.executable, "-m", "parent", "pull", "starter"], env=environment, cwd=ROOT, check=True)
    return next((data / "models").glob("SmolLM2*"))


def run_module(name: str, *arguments: str) -> str:
    return subprocess.check_output([sys.executable, "-m", name, *arguments], cwd=ROOT, text=True)


def machine() -> str:
    cores = os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"


# ---------------------------------------------------------------- the table


def print_report(report: dict[str, Any]) -> None:
    ways = report["ways"]
    print(f"{report['machine']}; {report['blas']}; model {report['model']}\n")
    print(f"{'':8} {'decode tok/s':>13} {'of bare':>8} {'TTFT short':>11} {'TTFT 1k':>9} {'repeated':>9}")
    for way, row in ways.items():
        share = row["decode_tps"] / ways["bare"]["decode_tps"]
        repeat = f"{row['ttft_repeat_s']:8.3f}s" if "ttft_repeat_s" in row else f"{'':>9}"
        print(
            f"{way:8} {row['decode_tps']:13.2f} {share:8.3f} {row['ttft_short_s']:10.3f}s "
            f"{row['ttft_1k_s']:8.3f}s {repeat}"
        )
    print(
        f"\nthrough parent / engine in-process: {ways['mlxd']['decode_tps'] / ways['engine']['decode_tps']:.3f}"
    )
    for name, value in report["start_to_first_answer_s"].items():
        print(f"start to first answer, {name}: {value:.2f} s")
    for name, value in report["memory"].items():
        print(f"peak {name}: {value:.0f}")


def print_wire(report: dict[str, Any]) -> None:
    for name, row in report["wire"].items():
        print(f"wire, {name}: {row['cpu_us_per_event']:.1f} us CPU an event, p50 {row['p50_ms']:.2f} ms")
    print(
        f"a token each {report['paced']['ms_per_token']:g} ms, parent / worker: {report['paced']['ratio']:.4f}"
    )


if __name__ == "__main__":
    main()
