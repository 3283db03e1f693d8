"""Supervisors of fake workers in the test's own loop, and parents of their own that tests kill.

`python -m tests.process.supervised RUNTIME_DIR MODEL_DIR GRACE_S` is such a parent: it brings up one worker, writes
the runtime file, says `ready`, and lives until it is killed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parent.workers import runtime_file
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import Limits, State
from parent.workers.supervisor import Supervisor
from shared import wire
from shared.control import LaunchModel
from tests.process.harness import DEADLINE_S, ROOT

COMMAND = [sys.executable, "-P", "-m", "tests.fakes.worker"]


def supervisor(runtime_dir: Path, model_dir: Path, *, grace_s: float = 0.0, **more: Any) -> Supervisor:
    """One for the fake worker; `model_dir/fake.json` is its script. `real=True` takes the real worker."""
    command = [sys.executable, "-P", "-m", "worker"] if more.pop("real", False) else COMMAND
    given: dict[str, Any] = {"limits": Limits(stop_grace_s=0.5), "heartbeat_s": 2.0} | more
    return Supervisor(
        LaunchModel(model_id="org/fake-1b", path=str(model_dir), grace_s=grace_s),
        command=command,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        runtime_dir=runtime_dir,
        **given,
    )


def write_script(model_dir: Path, script: dict[str, Any]) -> Path:
    model_dir.mkdir(exist_ok=True)
    (model_dir / "fake.json").write_text(json.dumps({"heartbeat_ms": 50} | script))
    return model_dir


async def reach(each: Supervisor, state: State, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a state."""
    await become(each, lambda: each.state is state, state.value, deadline_s)


async def become(
    each: Supervisor, question: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
) -> None:
    """Wait until the answer is true; asked at every change and heartbeat, and now and then."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not question():
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}; it is {each.state}")
        await each.changed(0.02)


async def down(each: Supervisor) -> None:
    """Stop it and wait until nothing of it is left."""
    each.stop()
    await each.absent()


async def say(each: Supervisor, text: str, seed: int = 7, **more: Any) -> str:
    """What the worker answers to one request."""
    assert each.client is not None
    request = wire.GenerateRequest(request_id=text, prompt=wire.TextPrompt(text), seed=seed, **more)
    said = ""
    async with await each.client.generate(request) as stream:
        async for events in stream:
            said += "".join(event.text for event in events if isinstance(event, wire.Text))
    return said


def parent(
    runtime_dir: Path, model_dir: Path, grace_s: float, *, real: bool = False
) -> "subprocess.Popen[str]":
    """A parent with a ready worker, in a process of its own."""
    words = [str(runtime_dir), str(model_dir), str(grace_s), *(["real"] if real else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.process.supervised", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    """SIGKILL, and wait for its end."""
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert process.stdout is not None
    process.stdout.close()


def left(runtime_dir: Path) -> RuntimeRecord:
    """The one worker that a killed parent wrote down."""
    (record,) = runtime_file.read(runtime_dir / runtime_file.NAME)
    return record


async def _be_a_parent(runtime_dir: Path, model_dir: Path, grace_s: float, real: bool) -> None:
    each = supervisor(runtime_dir, model_dir, grace_s=grace_s, real=real)
    each.want()
    await reach(each, State.READY)
    record = each.record()
    assert record is not None
    runtime_file.write(runtime_dir / runtime_file.NAME, [record])
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_be_a_parent(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), "real" in sys.argv))
