"""A job as clients see it."""

from typing import Any

import msgspec

from parent.jobs.advice import advice
from parent.jobs.store import Job, JobEventRow

LONGEST_SPEC = 16 * 1024
LONGEST_TEXT = 200


class Aside(msgspec.Struct, frozen=True):
    """What only the present server knows. `waits_for`: why a queued job has not begun. `paused_for`: "answers" where a
    running one waits between two steps.
    """

    waits_for: str = ""
    paused_for: str = ""


def view(job: Job, aside: Aside = Aside()) -> dict[str, Any]:  # noqa: B008  (frozen)
    """Times are seconds since the epoch; `progress` is a share from 0 to 1, `done` and `total` are the stage's."""
    failure = job.failure
    return {
        "id": job.id,
        "kind": job.kind,
        "status": job.state,
        "becomes": job.verdict,
        "spec": _shown(job.spec),
        "progress": 1.0 if job.state == "done" else min(job.done / job.total, 1.0) if job.total else 0.0,
        "stage": job.stage,
        "done": job.done,
        "total": job.total,
        "message": job.message,
        "waits_for": aside.waits_for,
        "paused_for": aside.paused_for,
        "attempt": job.attempt,
        "output_path": job.output,
        "result": {"output": job.output, "summary": job.message} if job.state == "done" else None,
        "error": {"code": failure.code, "message": failure.message, "advice": advice(job.kind, failure)}
        if failure
        else None,
        "checkpoint": {"name": job.resume, "step": job.saved_step} if job.resume else None,
        "needs_bytes": job.needs,
        "peak_bytes": job.peak_bytes,
        "owner": {"pid": job.owner_pid, "started_at": job.owner_started, "heartbeat_at": job.heartbeat_at}
        if job.owner_pid
        else None,
        "pinned": job.pinned,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "retry_at": job.retry_at,
        "rerun_of": job.rerun_of,
    }


def _shown(spec: str) -> Any:
    """As it is, but for the texts of a long one (of a data set, say), which would go out with every step of the job."""
    if len(spec) <= LONGEST_SPEC:
        return msgspec.Raw(spec.encode())
    return _cut(msgspec.json.decode(spec))


def _cut(value: Any) -> Any:
    match value:
        case str() if len(value) > LONGEST_TEXT:
            return f"{value[:LONGEST_TEXT]}… ({len(value)} characters)"
        case dict():
            return {name: _cut(inner) for name, inner in value.items()}
        case list():
            return [_cut(inner) for inner in value[:LONGEST_TEXT]]
        case _:
            return value


def event_view(row: JobEventRow) -> dict[str, Any]:
    """One thing that happened to a job. `id` is its place among them."""
    return {"id": row.seq, "at": row.at, "type": row.kind, **msgspec.json.decode(row.data)}
