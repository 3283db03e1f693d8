"""The job that does nothing, in steps: for checks of the job machinery."""

from shared.jobs import JobDone, JobStage, NoopJob
from worker.jobs.context import JobContext


def run(spec: NoopJob, ctx: JobContext) -> JobDone:
    """Count to `spec.steps`. Raises `Refused` when stopped."""
    for step in range(spec.steps):
        ctx.check()
        ctx.emit(JobStage("counting", step + 1, spec.steps))
    return JobDone(summary=f"{spec.steps} steps")
