"""The job store: rows that move by table J alone, and what each job told.

A transition reads the row, asks the table and updates the row in one transaction, `WHERE id = ? AND state = ?`; a
trigger of the database guards the states that are final. Times are wall-clock seconds, for people to read.
"""

import secrets
import sqlite3
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from parent.db import Database
from parent.jobs import kinds
from parent.jobs.states import ACTIVE, TERMINAL, Event, Facts, IllegalTransition, State, advance
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.jobs import JobSpec

MAX_DEATHS = (
    5  # servers that may die under one resumable job that gets no further; then it is not begun again
)
MAX_LINES = 1000
"""Lines and stages kept of each job; states, metrics and checkpoints are all kept."""

TRIM_EVERY = 64
FAR_S = 600.0  # no retry is planned further ahead: the clock was set back


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `spec` is JSON: a row of another version of mlxd may hold a kind that this one does not know."""

    id: str
    kind: str
    spec: str
    state: State
    verdict: State | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    stage: str
    done: int
    total: int
    message: str
    attempt: int
    orphaned: int  # servers that died while it ran
    fruitless: int  # tries in a row that brought nothing new
    retry_at: float | None
    owner_pid: int | None
    owner_started: float | None
    output: str
    error: str | None  # a Failure, as JSON
    resume: str  # what the worker left for its next start
    rerun_of: str | None
    heard: int  # of its present process: the last update that is written down
    worker: str  # its present process, as JSON, once that was told what to do; see `record.py`
    needs: int  # bytes of memory that it is charged with
    peak_bytes: int
    saved_step: int
    heartbeat_at: float | None
    pinned: bool

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    @property
    def failure(self) -> Failure | None:
        return msgspec.json.decode(self.error, type=Failure) if self.error else None


class JobEventRow(msgspec.Struct, frozen=True):
    """One thing that happened to a job. `data` is JSON."""

    seq: int
    at: float
    kind: str
    data: str


class Finished(msgspec.Struct, frozen=True):
    """A job that is over, and how much the database holds of it."""

    id: str
    ended_at: float
    bytes: int


class Owner(msgspec.Struct, frozen=True):
    """A process, for good: pids are given out again, a pid with its start time is not."""

    pid: int
    started: float


_COLUMNS = ", ".join(Job.__struct_fields__)
_SETTABLE = frozenset(
    {"stage", "done", "total", "message", "fruitless", "orphaned", "retry_at", "owner_pid", "owner_started", "output",
     "error", "resume", "heard", "worker", "peak_bytes", "saved_step", "heartbeat_at"}
)  # fmt: skip


class Jobs:
    """The store. `clock`: seconds since the epoch."""

    def __init__(self, db: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = db
        self._clock = clock

    async def create(
        self,
        spec: JobSpec,
        *,
        output: str = "",
        needs: int = 0,
        rerun_of: str | None = None,
        job_id: str = "",
        resume: str = "",
        saved_step: int = 0,
    ) -> Job:
        """A new row, queued. Raises `Refused` (conflict) naming the job that has what this one needs to itself."""
        now, new = self._clock(), job_id or new_id()
        body = msgspec.json.encode(spec).decode()
        exclusive = kinds.exclusive_of(spec, output)

        def insert(db: sqlite3.Connection) -> Job:
            try:
                db.execute(
                    "INSERT INTO jobs (id, kind, spec, exclusive, state, created_at, output, rerun_of, needs, "
                    "resume, saved_step) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(new, kinds.tag_of(spec), body, exclusive, State.QUEUED, now, output, rerun_of),
                        *(needs, resume, saved_step),
                    ),
                )
            except sqlite3.IntegrityError:
                over = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
                (other, state) = db.execute(
                    f"SELECT id, state FROM jobs WHERE exclusive = ? AND state NOT IN ({over})", (exclusive,)
                ).fetchone()
                said = f"{other} is at it already ({state}); wait for it, resume it, or cancel it"
                raise refuse(ErrorCode.CONFLICT, said) from None
            _add_event(db, new, now, "state", {"state": State.QUEUED})
            return _row(db, new)

        return await self._db.write(insert)

    async def apply(self, job_id: str, event: Event, *, transient: bool = False, **changes: Any) -> Job:
        """One event of table J, and `changes` of columns with it.

        Raises `IllegalTransition`, or `Refused` (not_found).
        """
        now = self._clock()
        return await self._db.write(
            lambda db: transition(db, job_id, event, now, transient=transient, **changes)
        )

    async def admit_next(self, owner: Owner) -> Job | None:
        """The oldest job whose turn has come, now starting and owned by `owner`; None = there is none."""
        for job in await self.queued():
            if self.due_in(job) == 0:
                return await self.admit(job.id, owner)
        return None

    async def admit(self, job_id: str, owner: Owner) -> Job:
        """A queued job is starting now, and `owner`'s. Raises as `apply`."""
        return await self.apply(job_id, Event.ADMIT, owner_pid=owner.pid, owner_started=owner.started)

    async def queued(self) -> list[Job]:
        """Oldest first."""
        return (await self.find(limit=-1, states={State.QUEUED}))[::-1]

    def due_in(self, job: Job) -> float:
        """Seconds until a queued job may be tried."""
        left = (job.retry_at or 0.0) - self._clock()
        return 0.0 if left <= 0 or left > FAR_S else left

    async def set(self, job_id: str, **changes: Any) -> None:
        """Columns that are no business of table J. A job that has gone is none's either."""
        assert _SETTABLE.issuperset(changes), changes
        await self._db.write(lambda db: _set(db, job_id, changes))

    async def pin(self, job_id: str, pinned: bool) -> Job:
        """A pinned job is kept, however old. Raises `Refused` (not_found)."""

        def mark(db: sqlite3.Connection) -> Job:
            db.execute("UPDATE jobs SET pinned = ? WHERE id = ?", (pinned, job_id))
            return _row(db, job_id)

        return await self._db.write(mark)

    async def note(self, job_id: str, kind: str, data: Any, **changes: Any) -> None:
        """Add to what the job told, and change columns with it."""
        assert _SETTABLE.issuperset(changes), changes
        now = self._clock()

        def add(db: sqlite3.Connection) -> None:
            _add_event(db, job_id, now, kind, data)
            _set(db, job_id, changes)

        await self._db.write(add)

    async def get(self, job_id: str) -> Job:
        """Raises `Refused` (not_found)."""
        return await self._db.read(lambda db: _row(db, job_id))

    async def find(
        self, *, limit: int = 50, kind: str = "", states: Collection[State] = frozenset(State)
    ) -> list[Job]:
        """Newest first."""
        marks = ", ".join("?" * len(states))
        return await self._db.read(
            lambda db: [
                _job(row)
                for row in db.execute(
                    f"SELECT {_COLUMNS} FROM jobs WHERE (? = '' OR kind = ?) AND state IN ({marks}) "
                    "ORDER BY rowid DESC LIMIT ?",
                    (kind, kind, *states, limit),
                )
            ]
        )

    async def active(self) -> list[Job]:
        """Every row with a process, or with what a dead server left of one."""
        return await self.find(limit=-1, states=ACTIVE)

    async def events(
        self, job_id: str, after: int = 0, *, kinds: Collection[str] = (), limit: int = -1
    ) -> list[JobEventRow]:
        """What the job told, oldest first, from sequence number `after` + 1 on; `kinds`: of these only."""
        marks = f"AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        return await self._db.read(
            lambda db: [
                JobEventRow(*row)
                for row in db.execute(
                    f"SELECT seq, at, kind, data FROM job_events WHERE job_id = ? AND seq > ? {marks} "
                    "ORDER BY seq LIMIT ?",
                    (job_id, after, *kinds, limit),
                )
            ]
        )

    async def count(self) -> dict[State, int]:
        """Jobs by state."""
        rows = await self._db.read(
            lambda db: db.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state").fetchall()
        )
        return {State(state): number for state, number in rows}

    async def finished(self) -> list[Finished]:
        """Jobs that are over and not pinned, the newest first. One that ended in the future (the clock was wrong) is
        taken to have ended now.
        """
        now = self._clock()

        def read(db: sqlite3.Connection) -> list[Finished]:
            db.execute("UPDATE jobs SET ended_at = ? WHERE ended_at > ?", (now, now))
            return [
                Finished(*row)
                for row in db.execute(
                    "SELECT id, ended_at, (SELECT COALESCE(SUM(LENGTH(data) + 32), 0) FROM job_events "
                    "WHERE job_id = jobs.id) FROM jobs WHERE ended_at IS NOT NULL AND NOT pinned "
                    "ORDER BY ended_at DESC, rowid DESC"
                )
            ]

        return await self._db.write(read)

    async def delete(self, job_ids: Collection[str]) -> int:
        """Forget jobs that are over, with what they told. Returns how many."""

        def delete(db: sqlite3.Connection) -> int:
            return sum(
                db.execute("DELETE FROM jobs WHERE id = ? AND ended_at IS NOT NULL", (job_id,)).rowcount
                for job_id in job_ids
            )

        return await self._db.write(delete)

    async def prune(self, *, older_than_s: float, keep: int) -> int:
        """Delete jobs that were over so long ago, and all but the newest `keep` that are over, the pinned left out."""
        rows, oldest = await self.finished(), self._clock() - older_than_s
        return await self.delete(
            [row.id for place, row in enumerate(rows) if place >= keep or row.ended_at < oldest]
        )


def new_id() -> str:
    """Of a job."""
    return f"job_{secrets.token_hex(8)}"


def transition(
    db: sqlite3.Connection, job_id: str, event: Event, now: float, *, transient: bool = False, **changes: Any
) -> Job:
    """`Jobs.apply` inside a transaction."""
    assert _SETTABLE.issuperset(changes), changes
    job = _row(db, job_id)
    facts = Facts(
        kinds.kind_of(job.kind).resumable,
        transient,
        job.orphaned + 1 < MAX_DEATHS,
        job.verdict,
        begun=bool(job.worker) or job.state is not State.STARTING,
    )
    state, verdict = advance(job.state, event, facts)
    values: dict[str, Any] = {"state": state, "verdict": verdict}
    match event:
        case Event.ADMIT:
            values |= {"attempt": job.attempt + 1, "retry_at": None, "heard": 0}
        case Event.STARTED if state is State.RUNNING:
            values |= {"started_at": job.started_at or now, "error": None}
        case Event.RESUME:
            values |= {"retry_at": None, "fruitless": 0, "orphaned": 0, "error": None}
        case Event.ORPHANED:
            values["orphaned"] = job.orphaned + 1
    if state not in ACTIVE:
        values |= {"owner_pid": None, "owner_started": None, "worker": ""}
    if state in TERMINAL:
        values |= {"ended_at": now, "retry_at": None}
    if event is Event.EXIT and job.state is State.STOPPING:  # it was decided before why it ends
        changes = {column: value for column, value in changes.items() if column not in ("error", "retry_at")}
    values |= changes
    if state in (State.DONE, State.CANCELLED):
        values["error"] = None
    setting = ", ".join(f"{column} = ?" for column in values)
    changed = db.execute(
        f"UPDATE jobs SET {setting} WHERE id = ? AND state IN (?)", (*values.values(), job_id, job.state)
    ).rowcount
    if changed != 1:
        raise IllegalTransition(f"{event} while {job.state}: {changed} rows of {job_id} changed")
    if state is not job.state:
        _add_event(db, job_id, now, "state", {"state": state, "event": event})
    return _row(db, job_id)


def _add_event(db: sqlite3.Connection, job_id: str, now: float, kind: str, data: Any) -> None:
    (last,) = db.execute(
        "SELECT COALESCE(MAX(seq), 0) FROM job_events WHERE job_id = ?", (job_id,)
    ).fetchone()
    body = msgspec.json.encode(data).decode()
    db.execute("INSERT INTO job_events VALUES (?, ?, ?, ?, ?)", (job_id, last + 1, now, kind, body))
    if last % TRIM_EVERY == 0:
        db.execute(
            "DELETE FROM job_events WHERE job_id = ? AND seq <= ? AND kind IN ('log', 'stage')",
            (job_id, last + 1 - MAX_LINES),
        )


def _set(db: sqlite3.Connection, job_id: str, changes: dict[str, Any]) -> None:
    if changes:
        setting = ", ".join(f"{column} = ?" for column in changes)
        db.execute(f"UPDATE jobs SET {setting} WHERE id = ?", (*changes.values(), job_id))


def _row(db: sqlite3.Connection, job_id: str) -> Job:
    row = db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise no_such_job(job_id)
    return _job(row)


def _job(row: tuple[Any, ...]) -> Job:
    values = dict(zip(Job.__struct_fields__, row, strict=True))
    return msgspec.convert(values | {"pinned": bool(values["pinned"])}, Job)


def no_such_job(job_id: str) -> Refused:
    """The refusal of an unknown id."""
    return refuse(ErrorCode.NOT_FOUND, f"there is no job {job_id}; GET /api/jobs lists them")
