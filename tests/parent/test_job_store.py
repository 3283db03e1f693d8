"""The job store moves as table J does, whatever comes, and its rows outlive it."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from parent.db import Database
from parent.jobs import store as stores
from parent.jobs.states import ACTIVE, TERMINAL, Event, Facts, IllegalTransition, State, advance
from parent.jobs.store import Job, Jobs, Owner
from parent.jobs.view import view
from shared.errors import ErrorCode, Refused
from shared.jobs import JobSpec, NoopJob, PullRepo

OWNER = Owner(pid=7, started=1.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def using(folder: Path, work: Callable[[Jobs, Database, Clock], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        db, clock = Database(folder).open(), Clock()
        try:
            return await work(Jobs(db, clock), db, clock)
        finally:
            await db.close()

    return asyncio.run(main())


class StoreIsTheTable(RuleBasedStateMachine):
    """Random events, legal and not, against rows and a dictionary moved by the pure table."""

    ids = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.model: dict[str, dict[str, Any]] = {}
        self.open()

    def open(self) -> None:
        self.db = Database(Path(self.folder.name)).open()
        self.jobs = Jobs(self.db, self.clock)

    def teardown(self) -> None:
        self.runner.run(self.db.close())
        self.runner.close()
        self.folder.cleanup()

    @rule(target=ids, repo=st.sampled_from(["", "a/b", "A/B", "c/d"]))
    def create(self, repo: str) -> Any:
        spec: JobSpec = PullRepo(repo=repo) if repo else NoopJob()
        key = repo.lower()
        busy = [
            job
            for job, row in self.model.items()
            if key and row["key"] == key and row["state"] not in (None, *TERMINAL)
        ]
        try:
            job = self.runner.run(self.jobs.create(spec))
        except Refused as refused:
            assert refused.failure.code is ErrorCode.CONFLICT  # noqa: PT017
            assert busy[0] in str(refused)  # noqa: PT017
            return multiple()
        assert not busy
        self.model[job.id] = {"state": State.QUEUED, "verdict": None, "key": key, "deaths": 0, "attempt": 0}
        return job.id

    @rule(job_id=ids, event=st.sampled_from(Event), transient=st.booleans(), later=st.floats(0, 5))
    def happens(self, job_id: str, event: Event, transient: bool, later: float) -> None:
        self.clock.now += later
        row = self.model[job_id]
        facts = Facts(bool(row["key"]), transient, row["deaths"] + 1 < stores.MAX_DEATHS, row["verdict"])
        try:
            expected = advance(row["state"], event, facts)
        except IllegalTransition:
            is_there = row["state"] is not None
            with pytest.raises(IllegalTransition if is_there else Refused):
                self.runner.run(self.jobs.apply(job_id, event, transient=transient))
            return
        job = self.runner.run(self.jobs.apply(job_id, event, transient=transient))
        assert (job.state, job.verdict) == expected
        row["state"], row["verdict"] = expected
        row["attempt"] += event is Event.ADMIT
        row["deaths"] = 0 if event is Event.RESUME else row["deaths"] + (event is Event.ORPHANED)

    @rule()
    def admit(self) -> None:
        queued = [job_id for job_id, row in self.model.items() if row["state"] is State.QUEUED]
        job = self.runner.run(self.jobs.admit_next(OWNER))
        assert (job.id if job else None) == (queued[0] if queued else None)
        if job:
            assert (job.owner_pid, job.state) == (7, State.STARTING)
            self.model[job.id]["state"] = State.STARTING
            self.model[job.id]["attempt"] += 1

    @rule(job_id=consumes(ids))
    def ages(self, job_id: str) -> None:
        if self.model[job_id]["state"] in TERMINAL:
            self.clock.now += 100
            gone = [job for job, row in self.model.items() if row["state"] in TERMINAL]
            assert self.runner.run(self.jobs.prune(older_than_s=50, keep=1000)) == len(gone)
            for job in gone:
                self.model[job]["state"] = None

    @precondition(lambda self: hasattr(self, "model"))
    @rule()
    def restarts(self) -> None:
        self.runner.run(self.db.close())
        self.open()

    @invariant()
    def rows_are_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        rows = {job.id: job for job in self.runner.run(self.jobs.find(limit=-1))}
        there = {job_id: row for job_id, row in self.model.items() if row["state"] is not None}
        assert {job_id: (job.state, job.verdict, job.attempt) for job_id, job in rows.items()} == {
            job_id: (row["state"], row["verdict"], row["attempt"]) for job_id, row in there.items()
        }
        for job in rows.values():
            assert (job.ended_at is not None) == (job.state in TERMINAL)
            assert job.state in ACTIVE or job.owner_pid is None
            view(job)


def test_the_store_moves_as_the_table_does() -> None:
    run_state_machine_as_test(
        StoreIsTheTable,
        settings=settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


def test_a_pruned_job_is_gone_for_everyone(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        made = [await jobs.create(NoopJob()) for _ in range(6)]
        for job in made[:5]:
            clock.now += 10
            await jobs.apply(job.id, Event.CANCEL)
            await jobs.note(job.id, "log", {"line": "hello"})
        assert await jobs.prune(older_than_s=35, keep=100) == 1
        assert await jobs.prune(older_than_s=1e9, keep=2) == 2
        assert {job.id for job in await jobs.find()} == {job.id for job in made[3:]}
        with pytest.raises(Refused, match=f"there is no job {made[0].id}"):
            await jobs.get(made[0].id)
        assert await jobs.events(made[0].id) == []
        assert await jobs.count() == {State.CANCELLED: 2, State.QUEUED: 1}

    using(tmp_path, work)


def test_a_job_that_ended_in_the_future_is_not_kept_for_ever(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        clock.now = 1e12
        await jobs.apply((await jobs.create(NoopJob())).id, Event.CANCEL)
        clock.now = 1000.0
        assert await jobs.prune(older_than_s=50, keep=100) == 0
        clock.now += 51
        assert await jobs.prune(older_than_s=50, keep=100) == 1

    using(tmp_path, work)


def test_the_database_itself_refuses_to_move_a_job_that_is_over(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> Job:
        job = await jobs.create(NoopJob())
        await jobs.apply(job.id, Event.CANCEL)
        with pytest.raises(Exception, match="the job is over"):
            await db.write(lambda c: c.execute("UPDATE jobs SET state = 'running'"))
        return await jobs.get(job.id)

    assert using(tmp_path, work).state is State.CANCELLED


def test_the_events_of_a_job_are_numbered_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> list[tuple[int, str]]:
        job = await jobs.create(NoopJob())
        for number in range(stores.MAX_EVENTS + 5):
            await jobs.note(job.id, "log", {"line": str(number)})
        return [(row.seq, row.kind) for row in await jobs.events(job.id, after=stores.MAX_EVENTS)]

    found = using(tmp_path, work)
    assert [number for number, _ in found] == list(range(stores.MAX_EVENTS + 1, stores.MAX_EVENTS + 7))


def test_a_retry_planned_beyond_all_measure_is_due(tmp_path: Path) -> None:
    """The clock was set back by a year while a job waited for its next try."""

    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        job = await jobs.create(PullRepo(repo="a/b"))
        await jobs.admit_next(OWNER)
        await jobs.apply(job.id, Event.EXIT, transient=True, retry_at=clock.now + 30)
        assert await jobs.admit_next(OWNER) is None
        assert await jobs.next_retry_s() == 30
        clock.now -= 365 * 86400
        taken = await jobs.admit_next(OWNER)
        assert taken is not None
        assert taken.id == job.id

    using(tmp_path, work)
