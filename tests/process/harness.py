"""A real parent process over a fake worker, and the few questions that tests ask it.

`with served(tmp_path, {...script...}, setting=…) as server:` starts one on a free port and ends it afterwards;
nothing it started is left behind, or the test fails.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 4096,
}
T = TypeVar("T")


def until(question: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first answer that is true. Fails with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s:g} s: {what}")


def chat(text: str, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A chat body with one user message; a `seed` makes answers comparable."""
    return {"messages": [{"role": "user", "content": text}], "stream": stream, "seed": 7, **fields}


def content(body: str) -> str:
    """The text of a stream's chunks."""
    return "".join(
        choice["delta"].get("content") or "" for frame in frames(body) for choice in frame.get("choices", [])
    )


def frames(body: str) -> list[dict[str, Any]]:
    """The JSON frames of a stream; comments and `[DONE]` left out."""
    lines = (line[6:] for line in body.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


class Served:
    """One running parent."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, data_dir: Path, model_dir: Path) -> None:
        self.process = process
        self.url = url
        self.data_dir = data_dir
        self.model_dir = model_dir
        self.http = httpx2.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)

    def engine(self) -> dict[str, Any]:
        """`/engine`."""
        answer: dict[str, Any] = self.http.get("/engine").json()
        return answer

    def wait_state(self, state: str) -> dict[str, Any]:
        """`/engine`, once the worker is in this state."""
        return until(lambda: found if (found := self.engine())["state"] == state else None, state)

    def journal(self, what: str, model: str = "model") -> list[dict[str, Any]]:
        """What the fake workers of a model wrote down."""
        path = self.model_dir.parent / model / "journal.ndjson"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for line in lines if (entry := json.loads(line))["what"] == what]

    def wait_journal(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """At least `count` entries of a kind."""
        return until(lambda: found if len(found := self.journal(what)) >= count else None, f"journal: {what}")

    def wait_journal_of(self, model: str, what: str) -> dict[str, Any]:
        """The first entry of a kind of one of the further models."""
        return until(lambda: self.journal(what, model), f"journal of {model}: {what}")[0]

    def kill_worker(self) -> int:
        """SIGKILL to the worker that is there; returns its pid."""
        pid = until(lambda: self.engine()["pid"], "a worker to kill")
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    def running(self) -> dict[str, dict[str, Any]]:
        """`/running`, by model."""
        return {row["model"]: row for row in self.http.get("/running").json()["models"]}

    def wait_phase(self, model: str, phase: str) -> dict[str, Any]:
        """The row of `/running` of a model, once it is in this phase; {} for absent."""

        def look() -> dict[str, Any] | None:
            row = self.running().get(model, {"phase": "absent"})
            return row if row["phase"] == phase else None

        return until(look, f"{model} {phase}")

    def ledger(self) -> dict[str, Any]:
        """`/admin/ledger`."""
        answer: dict[str, Any] = self.http.get("/admin/ledger").json()
        return answer

    def ask(self, text: str = "hi", **fields: Any) -> httpx2.Response:
        """One chat request."""
        return self.http.post("/v1/chat/completions", json=chat(text, **fields))

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(deadline_s)

    def errors(self) -> str:
        """What the parent wrote to stderr."""
        return (self.data_dir.parent / "stderr").read_text()


def write_model(folder: Path, script: dict[str, Any], aliases: tuple[str, ...] = ()) -> None:
    """A model folder for the fake worker: a real one to the library, its weights of `measured_bytes` a hole."""
    folder.mkdir(exist_ok=True)
    (folder / "fake.json").write_text(json.dumps({"heartbeat_ms": 100} | script))
    if (folder / "config.json").exists():
        return
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "mlxd.json").write_text(json.dumps({"aliases": aliases}))
    size = max(4, script.get("measured_bytes", 4) // 4 * 4)
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.mlp.weight": tensor}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def start(
    tmp_path: Path,
    script: dict[str, Any],
    settings: dict[str, Any],
    models: dict[str, dict[str, Any]] | None = None,
) -> "subprocess.Popen[str]":
    """The parent process alone. `models`: further ones by name, each with its script."""
    scripts = {"model": script} | (models or {})
    for name, each in scripts.items():
        write_model(tmp_path / name, each, ("fake",) if name == "model" else ())
    given = {"data_dir": str(tmp_path / "data"), "port": 0} | settings
    with open(tmp_path / "stderr", "a") as stderr:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.process.serve_fake", json.dumps(given)),
                *(str(tmp_path / name) for name in scripts),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


@contextlib.contextmanager
def served(
    tmp_path: Path,
    script: dict[str, Any] | None = None,
    models: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """A parent that listens; its worker may still be loading."""
    process = start(tmp_path, script or {}, settings, models)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url, (tmp_path / "stderr").read_text()
    server = Served(process, url, tmp_path / "data", tmp_path / "model")
    try:
        yield server
    finally:
        server.http.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        process.stdout.close()
        names = ["model", *(models or {})]
        pids = {entry["pid"] for name in names for entry in server.journal("spawned", name)}
        until(lambda: not [pid for pid in pids if is_running(pid)], "no worker left behind", 10.0)


def left_in(data_dir: Path) -> set[str]:
    """What a server left in its data folder that should live no longer than itself."""
    return {path.name for path in data_dir.iterdir()} - {"mlxd.sqlite", "mlxd.toml"}


def is_running(pid: int) -> bool:
    """True for a process that is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
