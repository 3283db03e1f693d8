"""The job queue over real worker processes: order, limits, stopping, hanging, and a parent that died."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from parent.bus import Bus
from parent.db import Database
from parent.jobs.queue import JobQueue
from parent.jobs.retry import Backoff
from parent.jobs.states import Event, State
from parent.jobs.store import Job, Jobs, Owner
from parent.workers.states import Limits
from shared.errors import ErrorCode, Refused
from shared.jobs import NoopJob, PullRepo
from tests.process.harness import ROOT, until

FAKE = [sys.executable, "-P", "-m", "tests.fakes.worker"]
DEADLINE_S = 30.0


@asynccontextmanager
async def queue_of(
    folder: Path, script: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[JobQueue]:
    """A started queue over fake workers (real ones without a script); closed at the end."""
    db, bus = Database(folder).open(), Bus()
    if script is not None:
        options |= {
            "worker_command": FAKE,
            "worker_env": {"PYTHONPATH": str(ROOT), "MLXD_FAKE": json.dumps(script)},
        }
    options = {"limits": Limits(stop_grace_s=0.3), "backoff": Backoff(first_s=0.01)} | options
    queue = JobQueue(db, bus.publish, **options)
    queue.bus = bus  # type: ignore[attr-defined]
    try:
        await queue.start()
        yield queue
    finally:
        await queue.close()
        await db.close()


async def becomes(queue: JobQueue, job: Job, *states: str) -> Job:
    """The row once it is in one of these states; woken by the bus, not by the clock."""
    async with asyncio.timeout(DEADLINE_S):
        now = await queue.get(job.id)
        if now.state in states:
            return now
        async for event in queue.bus.subscribe(0):  # type: ignore[attr-defined]
            if event.data["id"] == job.id and event.data["status"] in states:
                now = await queue.get(job.id)
                if now.state in states:
                    return now
    raise AssertionError("the bus was closed")


def workers() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def none_left() -> None:
    until(lambda: not [child for child in workers() if child.status() != "zombie"], "no job process left")


def test_a_job_runs_to_its_end_in_a_real_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path) as queue:
            job = await queue.submit(NoopJob(steps=5))
            assert job.state is State.QUEUED
            ended = await becomes(queue, job, "done", "failed")
            assert (ended.state, ended.message, ended.attempt) == (State.DONE, "5 steps", 1)
            assert (ended.done, ended.total, ended.stage) == (5, 5, "counting")
            told = [json.loads(row.data).get("state") for row in await queue.store.events(job.id)]
            assert [state for state in told if state] == ["queued", "starting", "running", "stopping", "done"]

    asyncio.run(main())
    none_left()


def test_a_failure_stands_in_the_row_and_a_job_that_cannot_go_on_is_not_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        script = {"fatal": "engine_unavailable", "fatal_message": "no luck"}
        async with queue_of(tmp_path, script) as queue:
            ended = await becomes(queue, await queue.submit(NoopJob()), "failed")
            assert ended.failure is not None
            assert (ended.failure.message, ended.attempt) == ("no luck", 1)

    asyncio.run(main())


def test_two_run_at_a_time_and_the_oldest_waiting_one_is_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 20}) as queue:
            jobs = [await queue.submit(NoopJob(steps=5)) for _ in range(5)]
            for job in jobs:
                await becomes(queue, job, "done")
            running: set[str] = set()
            order = []
            for event in queue.bus._ring:  # type: ignore[attr-defined]
                if event.data["status"] == "starting":
                    order.append(event.data["id"])
                    running.add(event.data["id"])
                elif event.data["status"] == "done":
                    running.discard(event.data["id"])
                assert len(running) <= 2
            assert order == [job.id for job in jobs]

    asyncio.run(main())


@pytest.mark.parametrize("stubborn", [False, True])
def test_cancelling_ends_the_process_and_the_job(tmp_path: Path, stubborn: bool) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 50, "ignore_shutdown": stubborn}) as queue:
            job = await queue.submit(NoopJob(steps=100_000))
            await becomes(queue, job, "running")
            assert (await queue.cancel(job.id)).verdict is State.CANCELLED
            ended = await becomes(queue, job, "cancelled")
            assert ended.error is None
            none_left()
            with pytest.raises(Refused, match="is cancelled: there is nothing to cancel"):
                await queue.cancel(job.id)

    asyncio.run(main())


def test_a_job_cancelled_in_its_first_moment_never_runs_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 50}) as queue:
            for waits in range(25):
                job = await queue.submit(NoopJob(steps=100_000))
                for _ in range(waits):
                    await asyncio.sleep(0)
                await queue.cancel(job.id)
                await becomes(queue, job, "cancelled")

    asyncio.run(main())
    none_left()


def test_pause_and_resume_take_a_job_from_and_to_the_queue(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 1e6}) as queue:
            job = await queue.submit(PullRepo(repo="org/name"))
            await becomes(queue, job, "running")
            await queue.pause(job.id)
            await becomes(queue, job, "paused")
            none_left()
            assert (await queue.pause(job.id)).state is State.PAUSED
            with pytest.raises(Refused, match=f"{job.id} is at it already") as refused:
                await queue.submit(PullRepo(repo="Org/Name"))
            assert refused.value.failure.code is ErrorCode.CONFLICT
            await queue.resume(job.id)
            again = await becomes(queue, job, "running")
            assert again.attempt == 2

    asyncio.run(main())


def test_what_cannot_go_on_cannot_be_paused(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 1e6}) as queue:
            job = await queue.submit(NoopJob())
            await becomes(queue, job, "running")
            with pytest.raises(Refused, match="a job of kind noop cannot be paused; cancel it"):
                await queue.pause(job.id)
            with pytest.raises(Refused, match="there is nothing to resume"):
                await queue.resume(job.id)
            with pytest.raises(Refused, match="there is no job job_0"):
                await queue.pause("job_0")

    asyncio.run(main())


def test_a_stopped_worker_is_found_out_and_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, silence_s=1.5, limits=Limits(stop_grace_s=0.3)) as queue:
            job = await queue.submit(NoopJob(steps=100_000_000))
            await becomes(queue, job, "running")
            (worker,) = workers()
            os.kill(worker.pid, signal.SIGSTOP)
            ended = await becomes(queue, job, "failed")
            assert ended.failure is not None
            assert "said nothing for 1.5 s" in ended.failure.message

    asyncio.run(main())
    none_left()


def test_a_dying_worker_of_a_resumable_job_is_replaced_until_nothing_new_comes(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"crash_after": 0}, backoff=Backoff(first_s=0.001, tries=3)) as queue:
            ended = await becomes(queue, await queue.submit(PullRepo(repo="a/b")), "failed")
            assert ended.failure is not None
            assert "was killed by SIGKILL" in ended.failure.message
            assert (ended.attempt, ended.fruitless) == (3, 3)

    asyncio.run(main())


def test_closing_queues_what_can_go_on_and_says_of_the_rest_that_it_was_interrupted(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {"ms_per_token": 1e6}) as queue:
            pull, noop = await queue.submit(PullRepo(repo="a/b")), await queue.submit(NoopJob())
            waiting = await queue.submit(NoopJob())
            for job in (pull, noop):
                await becomes(queue, job, "running")
        db = Database(tmp_path).open()
        found = {job.id: job for job in await Jobs(db).find()}
        await db.close()
        assert [found[job.id].state for job in (pull, noop, waiting)] == ["queued", "failed", "queued"]
        assert found[noop.id].failure is not None
        assert "interrupted" in str(found[noop.id].error)
        none_left()
        async with queue_of(tmp_path, {}) as queue:
            await becomes(queue, pull, "done")
            await becomes(queue, waiting, "done")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("owner", "orphan"),
    [
        (lambda: Owner(pid=2**22 - 3, started=1.0), True),  # nobody
        (lambda: Owner(os.getppid(), started=1.0), True),  # the pid was given out again
        (lambda: Owner(os.getpid(), psutil.Process().create_time()), True),  # we, before an exec in place
        (lambda: Owner(os.getppid(), psutil.Process(os.getppid()).create_time()), False),  # alive
    ],
)
def test_rows_of_a_dead_parent_are_taken_over(
    tmp_path: Path, owner: Callable[[], Owner], orphan: bool
) -> None:
    async def main() -> None:
        db = Database(tmp_path).open()
        jobs = Jobs(db)
        pull, noop, stopping = (
            await jobs.create(PullRepo(repo="a/b")), await jobs.create(NoopJob()), await jobs.create(NoopJob())
        )  # fmt: skip
        for _ in range(3):
            await jobs.admit_next(owner())
        await jobs.apply(pull.id, Event.STARTED)
        await jobs.set(noop.id, worker="{}")  # it was told what to do
        await jobs.apply(stopping.id, Event.CANCEL)
        await db.close()
        async with queue_of(tmp_path, {}) as queue:
            if orphan:
                await becomes(queue, pull, "done")
                assert (await queue.get(noop.id)).state is State.FAILED
                assert "interrupted" in str((await queue.get(noop.id)).error)
                assert (await queue.get(stopping.id)).state is State.CANCELLED
            else:
                states = [(await queue.get(job.id)).state for job in (pull, noop, stopping)]
                assert states == ["running", "starting", "stopping"]

    asyncio.run(main())


def test_a_job_under_which_server_after_server_dies_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        db = Database(tmp_path).open()
        jobs = Jobs(db)
        job = await jobs.create(PullRepo(repo="a/b"))
        for _ in range(5):
            await jobs.admit_next(Owner(1, 1.0))
            job = await jobs.apply(job.id, Event.ORPHANED)
        await db.close()
        assert (job.state, job.orphaned) == (State.LOST, 5)

    asyncio.run(main())


def test_a_kind_of_another_version_fails_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path, {}, max_running=1) as queue:
            job = await queue.submit(NoopJob())
            blocked = await queue.submit(NoopJob())
            db = queue.store._db
            await db.write(
                lambda c: c.execute("UPDATE jobs SET spec = '{\"type\":\"dream\"}', kind = 'dream'")
            )
            del job
            ended = await becomes(queue, blocked, "failed")
            assert "cannot run" in str(ended.error)
            assert "dream" in str(ended.error)

    asyncio.run(main())


def test_progress_reaches_the_bus_at_most_once_a_second(tmp_path: Path) -> None:
    async def main() -> None:
        async with queue_of(tmp_path) as queue:
            job = await queue.submit(NoopJob(steps=20_000))
            ended = await becomes(queue, job, "done")
            told = [event for event in queue.bus._ring if event.data["status"] == "running"]  # type: ignore[attr-defined]
            assert ended.done == 20_000
            assert len(told) < 100  # of 20,000 steps

    asyncio.run(main())
