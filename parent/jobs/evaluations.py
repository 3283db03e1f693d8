"""What models were measured to be: results of the jobs that evaluate and benchmark, kept, and compared over time."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from parent.db import Database
from parent.jobs import kinds
from parent.jobs.states import State
from parent.jobs.store import Job, Jobs
from shared.jobs import JobSpec
from shared.lab import Benchmark, Evaluate
from shared.version import VERSION

KINDS: tuple[type[JobSpec], ...] = (Evaluate, Benchmark)
RESULT = "result"
"""The kind of the event that holds what a job found."""
_NOT_WHAT = {"model", "model_id", "url", "adapter"}


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `what`: its settings, which two that are compared have in common. `before`: the numbers of the
    one before it, of the same model and settings.
    """

    id: int = 0
    job_id: str
    kind: str
    model: str
    what: dict[str, Any]
    numbers: dict[str, float]
    details: dict[str, Any] = {}
    summary: str = ""
    at: float
    versions: dict[str, str] = {}
    before: dict[str, float] | None = None


class Evaluations:
    """The table. `clock`: seconds since the epoch."""

    def __init__(self, db: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = db
        self._clock = clock

    async def add(self, one: Evaluation) -> None:
        """Keep it; that of a job which is here already stays as it is."""
        await self._db.write(
            lambda db: db.execute(
                "INSERT OR IGNORE INTO evaluations "
                "(job_id, kind, model, what, numbers, details, summary, at, versions) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    one.job_id,
                    one.kind,
                    one.model,
                    _text(one.what),
                    _text(one.numbers),
                    _text(one.details),
                    one.summary,
                    one.at,
                    _text(one.versions),
                ),
            )
        )

    async def take(self, job: Job, store: Jobs) -> None:
        """Keep what a job has found, once it is done."""
        if job.state is not State.DONE or job.kind not in _TAGS:
            return
        found = [event.data for event in await store.events(job.id) if event.kind == RESULT]
        if found:
            spec = kinds.decode_spec(job.spec)
            result = msgspec.json.decode(found[-1])
            at = job.ended_at or self._clock()
            await self.add(evaluation_of(spec, result, job_id=job.id, summary=job.message, at=at))

    async def catch_up(self, store: Jobs) -> None:
        """Keep what jobs found whose server died before it could."""
        known = await self._db.read(
            lambda db: {row[0] for row in db.execute("SELECT job_id FROM evaluations")}
        )
        for tag in _TAGS:
            for job in await store.find(limit=-1, kind=tag, states={State.DONE}):
                if job.id not in known:
                    await self.take(job, store)

    async def find(self, *, model: str = "", kind: str = "", limit: int = 50) -> list[Evaluation]:
        """Newest first, each with what it is to be compared with."""

        def read(db: sqlite3.Connection) -> list[Any]:
            return db.execute(
                "SELECT number, job_id, kind, model, what, numbers, details, summary, at, versions FROM evaluations "
                "WHERE (? = '' OR model = ?) AND (? = '' OR kind = ?) ORDER BY at DESC, number DESC",
                (model, model, kind, kind),
            ).fetchall()

        return compared([_evaluation(row) for row in await self._db.read(read)])[:limit]


def evaluation_of(
    spec: JobSpec, result: dict[str, Any], *, job_id: str, summary: str, at: float
) -> Evaluation:
    """What a job of these kinds has found."""
    assert isinstance(spec, Evaluate | Benchmark)
    model = spec.model
    if isinstance(spec, Evaluate):
        model = spec.model_id or spec.model
        if spec.adapter:
            model = f"{model}:{spec.adapter.rstrip('/').rpartition('/')[2]}"
    settings = msgspec.structs.asdict(spec)  # defaults too: they may be others one day
    return Evaluation(
        job_id=job_id,
        kind=kinds.tag_of(spec),
        model=model,
        what={name: value for name, value in settings.items() if name not in _NOT_WHAT},
        numbers=result.get("numbers") or {},
        details={name: value for name, value in result.items() if name not in ("numbers", "versions")},
        summary=summary,
        at=at,
        versions={"mlxd": VERSION, **(result.get("versions") or {})},
    )


def compared(newest_first: Sequence[Evaluation]) -> list[Evaluation]:
    """Each with the numbers of the one before it, of the same model and settings. Pure."""
    before: dict[tuple[str, str, str], dict[str, float]] = {}
    found: list[Evaluation] = []
    for one in reversed(newest_first):
        key = (one.kind, one.model, _text(one.what))
        found.append(msgspec.structs.replace(one, before=before.get(key)))
        before[key] = one.numbers
    return found[::-1]


def _evaluation(row: tuple[Any, ...]) -> Evaluation:
    number, job_id, kind, model, what, numbers, details, summary, at, versions = row
    decode = msgspec.json.decode
    return Evaluation(
        id=number,
        job_id=job_id,
        kind=kind,
        model=model,
        what=decode(what),
        numbers=decode(numbers),
        details=decode(details),
        summary=summary,
        at=at,
        versions=decode(versions),
    )


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


_TAGS = {str(kind.__struct_config__.tag) for kind in KINDS}
