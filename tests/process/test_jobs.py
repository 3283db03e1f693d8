"""Job workers, real processes: the end, the failure, the crash, the cancel."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from parent.jobs.run import run_job
from parent.workers.states import Limits
from shared.errors import ErrorCode, Refused
from shared.jobs import JobDone, JobEvent, JobStage, JobStarted, NoopJob
from tests.process.harness import ROOT, until

COMMAND = [sys.executable, "-P", "-m", "tests.fakes.worker"]


def run(
    script: dict[str, Any], on_event: Any, tmp_path: Path, *, steps: int = 3, limits: Limits | None = None
) -> Any:
    return run_job(
        NoopJob(steps=steps),
        tmp_path / "out",
        on_event=on_event,
        worker_command=COMMAND,
        worker_env={"PYTHONPATH": str(ROOT), "MLXD_FAKE": json.dumps(script)},
        limits=limits or Limits(),
    )


def test_a_job_tells_its_events_and_returns_what_it_made(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    done = asyncio.run(run({}, events.append, tmp_path))
    assert done == JobDone(output=str(tmp_path / "out"), summary="counted 3")
    assert isinstance(events[0], JobStarted)
    assert [event.done for event in events if isinstance(event, JobStage)] == [1, 2, 3]
    assert events[-1] == done


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    script = {"fatal": "unsupported", "fatal_message": "tensor type Q5_K is not supported"}
    with pytest.raises(Refused, match="tensor type Q5_K") as refused:
        asyncio.run(run(script, lambda event: None, tmp_path))
    assert refused.value.failure.code is ErrorCode.UNSUPPORTED


def test_a_crash_of_a_job_says_how_and_shows_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="was killed by SIGKILL before it was done: about to die"):
        asyncio.run(run({"crash_after": 1}, lambda event: None, tmp_path))


def test_a_job_worker_of_another_wire_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="wire 99"):
        asyncio.run(run({"wire": 99}, lambda event: None, tmp_path))


def test_a_job_worker_that_says_no_hello_is_ended(tmp_path: Path) -> None:
    limits = Limits(hello_s=1.0, stop_grace_s=0.2)
    with pytest.raises(Refused, match="did not say hello"):
        asyncio.run(run({"no_hello": True}, lambda event: None, tmp_path, limits=limits))


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_cancelled_job_leaves_no_process(tmp_path: Path, stubborn: bool) -> None:
    before = set(psutil.Process().children(recursive=True))  # servers that other files share

    async def main() -> list[psutil.Process]:
        begun = asyncio.Event()
        task = asyncio.ensure_future(
            run(
                {"ms_per_token": 50, "ignore_shutdown": stubborn},
                lambda event: begun.set(),
                tmp_path,
                steps=100_000,
                limits=Limits(stop_grace_s=0.3),
            )
        )
        await begun.wait()
        born = [child for child in psutil.Process().children(recursive=True) if child not in before]
        assert born, "no job process is seen"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return born

    born = asyncio.run(main())
    until(lambda: not [child for child in born if child.is_running()], "no job process left")


def test_a_command_that_cannot_be_started_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="could not be started"):
        asyncio.run(run_job(NoopJob(), tmp_path, worker_command=[str(tmp_path / "no such program")]))
