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

from parent.db import MIGRATIONS, Database
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
        self.model[job.id] = {"state": State.QUEUED, "verdict": None, "key": key, "deaths": 0, "attempt": 0,
                               "told": False}  # fmt: skip
        return job.id

    @rule(job_id=ids, event=st.sampled_from(Event), transient=st.booleans(), later=st.floats(0, 5))
    def happens(self, job_id: str, event: Event, transient: bool, later: float) -> None:
        self.clock.now += later
        row = self.model[job_id]
        deaths_left = row["deaths"] + 1 < stores.MAX_DEATHS
        begun = row["told"] or row["state"] is not State.STARTING
        facts = Facts(bool(row["key"]), transient, deaths_left, row["verdict"], begun)
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
        row["told"] = row["told"] and expected[0] in ACTIVE
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

    @rule(job_id=ids)
    def is_told_what_to_do(self, job_id: str) -> None:
        if self.model[job_id]["state"] in ACTIVE:
            self.runner.run(self.jobs.set(job_id, worker="{}"))
            self.model[job_id]["told"] = True

    @rule(job_id=consumes(ids), pinned=st.booleans())
    def ages(self, job_id: str, pinned: bool) -> None:
        if self.model[job_id]["state"] in TERMINAL:
            self.runner.run(self.jobs.pin(job_id, pinned))
            self.model[job_id]["pinned"] = pinned
            self.clock.now += 100
            over = [job for job, row in self.model.items() if row["state"] in TERMINAL]
            gone = [job for job in over if not self.model[job].get("pinned")]
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
            assert job.state in ACTIVE or (job.owner_pid, job.worker) == (None, "")
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


def test_lines_are_bounded_and_what_was_measured_is_all_kept(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        job = await jobs.create(NoopJob())
        for number in range(stores.MAX_LINES):
            await jobs.note(job.id, "metric", {"kind": "train", "step": number})
            await jobs.note(job.id, "log", {"line": str(number)})
        rows = await jobs.events(job.id)
        assert [row.seq for row in rows] == sorted({row.seq for row in rows})
        assert sum(row.kind == "metric" for row in rows) == stores.MAX_LINES
        lines = [row for row in rows if row.kind == "log"]
        most = stores.MAX_LINES // 2 + stores.TRIM_EVERY
        assert stores.MAX_LINES // 2 <= len(lines) <= most
        assert lines[-1].seq == 2 * stores.MAX_LINES + 1
        page = await jobs.events(job.id, after=rows[4].seq, kinds=("metric",), limit=3)
        assert [row.kind for row in page] == ["metric"] * 3
        assert page[0].seq > rows[4].seq

    using(tmp_path, work)


def test_what_a_worker_told_and_its_number_are_written_together(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        job = await jobs.create(PullRepo(repo="a/b"))
        job = await jobs.admit(job.id, OWNER)
        await jobs.note(job.id, "saved", {"step": 3}, heard=7, resume="step-3", saved_step=3)
        job = await jobs.get(job.id)
        assert (job.heard, job.resume, job.saved_step) == (7, "step-3", 3)
        await jobs.apply(job.id, Event.EXIT, transient=True, retry_at=clock.now)
        job = await jobs.admit(job.id, OWNER)
        assert (job.heard, job.resume) == (
            0,
            "step-3",
        )  # another process counts anew, from that checkpoint on

    using(tmp_path, work)


def test_a_job_whose_process_was_told_nothing_is_begun_again_whatever_its_kind(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        untold, told = await jobs.create(NoopJob()), await jobs.create(NoopJob())
        for job in (untold, told):
            await jobs.admit(job.id, OWNER)
        await jobs.set(told.id, worker="{}")
        assert (await jobs.apply(untold.id, Event.ORPHANED)).state is State.QUEUED
        assert (await jobs.apply(told.id, Event.ORPHANED)).state is State.FAILED

    using(tmp_path, work)


def test_two_jobs_with_one_output_are_a_conflict_that_names_the_first(tmp_path: Path) -> None:
    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        first = await jobs.create(NoopJob(), output="/models/a")
        with pytest.raises(Refused, match=f"{first.id} is at it already"):
            await jobs.create(NoopJob(), output="/Models/A")
        await jobs.create(NoopJob(), output="/models/b")
        await jobs.apply(first.id, Event.CANCEL)
        await jobs.create(NoopJob(), output="/models/a")

    using(tmp_path, work)


def test_a_database_of_the_schema_before_is_brought_forward_with_its_rows(tmp_path: Path) -> None:
    async def main() -> None:
        old = Database(tmp_path, MIGRATIONS[:2]).open()
        await old.write(
            lambda db: db.execute(
                "INSERT INTO jobs (id, kind, spec, state, created_at, owner_pid, owner_started) "
                """VALUES ('job_1', 'pull', '{"type":"pull","repo":"a/b"}', 'running', 5.0, 1, 1.0)"""
            )
        )
        await old.close()
        db = Database(tmp_path).open()
        job = await Jobs(db).get("job_1")
        assert (job.state, job.heard, job.worker, job.pinned) == (State.RUNNING, 0, "", False)
        assert (await Jobs(db).apply("job_1", Event.ORPHANED)).state is State.QUEUED
        await db.close()
        with pytest.raises(Refused, match="is of a newer mlxd"):
            Database(tmp_path, MIGRATIONS[:2]).open()

    asyncio.run(main())


def test_a_retry_planned_beyond_all_measure_is_due(tmp_path: Path) -> None:
    """The clock was set back by a year while a job waited for its next try."""

    async def work(jobs: Jobs, db: Database, clock: Clock) -> None:
        job = await jobs.create(PullRepo(repo="a/b"))
        await jobs.admit_next(OWNER)
        await jobs.apply(job.id, Event.EXIT, transient=True, retry_at=clock.now + 30)
        assert await jobs.admit_next(OWNER) is None
        assert [jobs.due_in(waiting) for waiting in await jobs.queued()] == [30]
        clock.now -= 365 * 86400
        taken = await jobs.admit_next(OWNER)
        assert taken is not None
        assert taken.id == job.id

    using(tmp_path, work)
