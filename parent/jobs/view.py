"""A job as clients see it."""

from typing import Any

import msgspec

from parent.jobs.store import Job


def view(job: Job) -> dict[str, Any]:
    """Times are seconds since the epoch; `progress` is a share from 0 to 1, `done` and `total` are the stage's."""
    failure = job.failure
    return {
        "id": job.id,
        "kind": job.kind,
        "status": job.state,
        "becomes": job.verdict,
        "spec": msgspec.Raw(job.spec.encode()),
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
