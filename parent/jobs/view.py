"""A job as clients see it."""

from typing import Any

import msgspec

from parent.jobs.store import Job

LONGEST_SPEC = 16 * 1024
LONGEST_TEXT = 200


def view(job: Job) -> dict[str, Any]:
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
        "attempt": job.attempt,
        "output_path": job.output,
        "error": {"code": failure.code, "message": failure.message} if failure else None,
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
