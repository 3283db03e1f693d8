"""Several streams at a time: all their tokens a second, over HTTP, beside mlx_lm.server and vllm-mlx.

The peers have the same BLAS, without our library in front of it.
"""

import contextlib
import http.client
import json
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from tests.bench.asking import Server, free_port, running
from tests.bench.engine_rigs import Rig, without_one_row
from tests.bench.pooled import together
from tests.bench.serve import ROOT
from tests.bench.verdict import How, Line, at_least
from tests.process.harness import until

STREAMS = (1, 2, 4, 8, 16)
TOKENS = 64
THEMES = ("storm", "harbour", "letter", "whale", "bell", "map", "anchor", "gull", "lamp", "rope")


class Told(NamedTuple):
    """A stream: its tokens, and when the last came."""

    tokens: int
    ended: float


def measure_streams(rig: Rig, folder: Path, how: How) -> list[Line]:
    """Servers are started anew for each number of streams, which they are told."""
    rounds = 2 if how.quick else 5
    lines = [] if isinstance(rig.vllm, Path) else [Line("streams", "vllm-mlx", rig.vllm)]
    for count in (1, 4, 16) if how.quick else STREAMS:
        rates = _rates(rig, folder, count, rounds)
        ours = rates.pop("mlxd")
        for name, theirs in rates.items():
            notes = f"{ours:.4g} / {theirs:.4g} tok/s"
            line = at_least("streams", f"{count} streams: mlxd / {name}", ours / theirs, 1.0, notes=notes)
            print(line.what, line.measured, file=sys.stderr, flush=True)  # an hour's work may yet break off
            lines.append(line)
    return lines


def _rates(rig: Rig, folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Tokens a second of each server, medians; each in turn, so that a busy moment hits all."""
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server) for name, server in _servers(rig, folder, count).items()}
        for server in servers.values():
            _until_it_answers(server)
        for _ in range(rounds):
            for name, server in servers.items():
                rates.setdefault(name, []).append(_aggregate(server, count))
    return {name: statistics.median(values) for name, values in rates.items()}


def _servers(rig: Rig, folder: Path, count: int) -> dict[str, contextlib.AbstractContextManager[Server]]:
    port, offline = free_port(), {**without_one_row(rig.environment), "HF_HUB_OFFLINE": "1"}
    ours = [rig.python, "-m", "parent", "serve", str(rig.model), "--no-open", "--port", str(port)]
    found = {
        "mlxd": running(
            [*ours, "--max-rows", str(count)],
            {"MLXD_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT)},
            port,
            rig.model.name,
        )
    }
    port = free_port()
    peer = [str(rig.peer), "-m", "mlx_lm", "server", "--model", str(rig.model), "--port", str(port)]
    peer += ["--decode-concurrency", str(count), "--prompt-concurrency", str(count)]
    found["mlx_lm.server"] = running(peer, offline, port, str(rig.model))
    if isinstance(rig.vllm, Path):
        port = free_port()
        vllm = [str(rig.vllm), "serve", str(rig.model), "--port", str(port), "--host", "127.0.0.1"]
        if count > 1:
            vllm += ["--continuous-batching", "--max-num-seqs", str(count)]
        found["vllm-mlx"] = running(vllm, offline, port, str(rig.model))
    return found


def _until_it_answers(server: Server) -> None:
    """Its first answer warms it up; some listen before they serve."""

    def answers() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, _NotYet):
            with _connected(server) as connection:
                _stream(server, "warm up", 4, connection)
            return True
        return False

    until(answers, f"an answer of {server.model}")


class _NotYet(Exception):
    """A status other than 200."""


def _aggregate(server: Server, count: int) -> float:
    """Tokens a second of `count` streams that begin together, from the first request to the last token.

    They are connected one after the other before: mlx_lm.server resets those that come at once beyond five.
    """
    prompts = [
        f"{uuid.uuid4().hex[:6]}: write a long story about a lighthouse keeper and a {THEMES[n % 10]}."
        for n in range(count)
    ]
    with contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(_connected(server)) for _ in prompts]
        began = time.perf_counter()
        told = together(
            lambda pair: _stream(server, pair[0], TOKENS, pair[1]),
            list(zip(prompts, open_ones, strict=True)),
        )
    if len(told) != count:
        raise SystemExit(f"{server.model}: {count - len(told)} of {count} streams failed")
    return sum(each.tokens for each in told) / (max(each.ended for each in told) - began)


def _connected(server: Server) -> contextlib.closing[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.connect()
    return contextlib.closing(connection)


def _stream(server: Server, prompt: str, tokens: int, connection: http.client.HTTPConnection) -> Told:
    """One greedy answer; tokens as the server counts them, as pieces of text where it does not."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = counted = 0
    ended = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise _NotYet(f"{answer.status}: {answer.read()[:300]!r}")
    for line in answer:
        if line.startswith(b"data: {"):
            frame = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in frame["choices"]):
                pieces += 1
                ended = time.perf_counter()
            counted = (frame.get("usage") or {}).get("completion_tokens") or counted
    return Told(counted or pieces, ended)
