"""Whose turn it is: jobs that wait for answers, for memory, for the disk; and what becomes of one without memory."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parent.jobs import run as runs_of_processes
from parent.jobs import runs
from parent.jobs.policy import Policy
from parent.jobs.states import State
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.jobs import CountJob, NoopJob
from tests.process.job_server import expected
from tests.process.test_job_queue import becomes, none_left, queue_of, workers


class FakePlaces:
    """Room that the test gives."""

    def __init__(self, waits: str = "") -> None:
        self.on_placed: Callable[[str], None] = lambda job: None
        self.on_displaced: Callable[[str], None] = lambda job: None
        self.waits = waits
        self.log: list[tuple[Any, ...]] = []

    def ask(self, job: str, need: int, *, may_leave: bool) -> str:
        self.log.append(("ask", need, may_leave))
        return self.waits

    def adopt(self, job: str, need: int, measured: int, *, may_leave: bool) -> None:
        self.log.append(("adopt", need))

    def leave(self, job: str) -> None:
        self.log.append(("leave",))

    def measure(self, job: str, held: int) -> None:
        self.log.append(("measure", held > 0))

    def never_fits(self, need: int) -> Failure | None:
        return Failure(ErrorCode.CANNOT_FIT, "too large") if need > 1000 else None


def test_a_job_on_the_gpu_takes_no_step_while_answers_run_and_goes_on_when_it_is_quiet(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, policy=lambda: Policy(quiet_s=0.01)) as queue:
            queue.answers(True)
            job = await queue.submit(CountJob(steps=50))
            await becomes(queue, job, "running")
            beside = await queue.submit(NoopJob())  # whoever needs no GPU is not in the way
            await becomes(queue, beside, "done")
            now = await queue.get(job.id)
            assert (now.state, now.done) == (State.RUNNING, 0)
            assert queue.view(now)["paused_for"] == "answers"
            queue.answers(False)
            ended = await becomes(queue, job, "done", "failed")
            assert ended.message == f"50 steps: {expected(50)}"
            assert queue.view(ended)["paused_for"] == ""

    asyncio.run(main())


def test_a_job_that_is_held_can_be_paused_and_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, policy=lambda: Policy(quiet_s=60)) as queue:
            queue.answers(True)
            job = await queue.submit(CountJob(steps=50, steps_per_save=10_000))
            await becomes(queue, job, "running")
            await queue.pause(job.id)
            paused = await becomes(queue, job, "paused")
            assert paused.resume == "step-0.json"
            await queue.resume(job.id)
            await becomes(queue, job, "running")
            await queue.cancel(job.id)
            await becomes(queue, job, "cancelled")

    asyncio.run(main())
    none_left()


def test_a_running_job_is_held_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROW_S", 0.01)

    async def main() -> None:
        async with queue_of(tmp_path, policy=lambda: Policy(quiet_s=0.0)) as queue:
            job = await queue.submit(CountJob(steps=100_000, step_s=0.001))
            await becomes(queue, job, "running")
            queue.answers(True)
            async for event in queue.bus.subscribe(0):  # type: ignore[attr-defined]
                if event.data["paused_for"] == "answers":
                    break
            await becomes(queue, await queue.submit(NoopJob()), "done")  # its last words have come by now
            before = (await queue.get(job.id)).done
            await becomes(queue, await queue.submit(NoopJob()), "done")
            assert (await queue.get(job.id)).done == before
            queue.answers(False)
            until_moves = queue.bus.subscribe(queue.bus.last_id)  # type: ignore[attr-defined]
            async for event in until_moves:
                if event.data["id"] == job.id and event.data["done"] > before:
                    break
            await queue.cancel(job.id)
            await becomes(queue, job, "cancelled")

    asyncio.run(main())


def test_a_job_waits_for_its_place_and_gives_it_back(tmp_path: Path) -> None:
    async def main() -> None:
        places = FakePlaces("memory: it needs 3 B, 1 B are free")
        async with queue_of(tmp_path, places=places) as queue:
            job = await queue.submit(CountJob(steps=3), needs=3)
            async for event in queue.bus.subscribe(0):  # type: ignore[attr-defined]
                if event.data["waits_for"]:
                    assert event.data["waits_for"] == "memory: it needs 3 B, 1 B are free"
                    break
            assert (await queue.get(job.id)).state is State.QUEUED
            places.waits = ""
            places.on_placed(job.id)
            await becomes(queue, job, "done")
            cancelled = await queue.submit(CountJob(steps=3), needs=4)
            await queue.cancel(cancelled.id)
            with pytest.raises(Refused, match="too large"):
                await queue.submit(CountJob(), needs=1001)
        assert ("ask", 3, True) in places.log
        assert places.log.count(("leave",)) >= 2

    asyncio.run(main())


def test_a_job_that_has_to_make_room_saves_and_is_queued_again(tmp_path: Path) -> None:
    async def main() -> None:
        places = FakePlaces()
        async with queue_of(tmp_path, places=places) as queue:
            job = await queue.submit(CountJob(steps=3000, step_s=0.001, steps_per_save=10_000))
            await becomes(queue, job, "running")
            places.waits = "its turn"
            places.on_displaced(job.id)
            again = await becomes(queue, job, "queued")
            assert again.saved_step > 0
            places.waits = ""
            places.on_placed(job.id)
            ended = await becomes(queue, job, "done", "failed")
            assert (ended.attempt, ended.message) == (2, f"3000 steps: {expected(3000)}")

    asyncio.run(main())


def test_what_a_full_disk_refuses_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ROW_S", 0.01)

    async def main() -> None:
        async with queue_of(tmp_path) as queue:
            note, refused = queue.store.note, [0]

            async def full(job_id: str, kind: str, data: Any, **changes: Any) -> None:
                if kind == "metric" and refused[0] < 3:
                    refused[0] += 1
                    raise refuse(ErrorCode.DISK_FULL, "the disk is full")
                await note(job_id, kind, data, **changes)

            queue.store.note = full  # type: ignore[method-assign]
            job = await queue.submit(CountJob(steps=40, steps_per_save=10))
            await becomes(queue, job, "done")
            rows = await queue.store.events(job.id, kinds=("metric",))
            assert [json.loads(row.data)["step"] for row in rows] == [10, 20, 30, 40]
            assert refused == [3]

    asyncio.run(main())


def test_a_worker_that_the_system_kills_for_memory_is_said_to_be_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def look(self) -> None:
            pass

        def is_short(self) -> bool:
            return True

    monkeypatch.setattr(runs_of_processes, "MemoryWatch", Short)

    async def main() -> None:
        async with queue_of(tmp_path) as queue:
            job = await queue.submit(CountJob(steps=100_000, step_s=0.01))
            async for event in queue.bus.subscribe(0):  # type: ignore[attr-defined]
                if event.data["stage"] == "counting":
                    break
            (worker,) = workers()
            os.kill(worker.pid, signal.SIGKILL)
            ended = await becomes(queue, job, "failed")
            assert ended.failure is not None
            assert ended.failure.code is ErrorCode.CANNOT_FIT
            assert ended.failure.message.startswith("out of memory")
            assert "(stage counting, " in ended.failure.message
            assert " of 100000)" in ended.failure.message
            assert ended.attempt == 1

    asyncio.run(main())


def test_a_folder_that_cannot_be_made_fails_the_job_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path) as queue:
            (tmp_path / "jobs").write_text("in the way")
            ended = await becomes(queue, await queue.submit(NoopJob()), "failed")
            assert "cannot be made" in str(ended.error)

    asyncio.run(main())
