"""The job that counts, with checkpoints: for checks of the job machinery. Its result is a number that every step went
into, so that a step that is lost or taken twice shows.
"""

import fcntl
import json
import time
from typing import IO

from shared.errors import ErrorCode, refuse
from shared.jobs import CountJob, JobDone, JobMetric, JobSaved, JobStage
from worker.jobs.context import JobContext, make_scratch, publish

FILE = "count.json"
_MODULUS = 2**61 - 1


def run(spec: CountJob, ctx: JobContext) -> JobDone:
    """Count from the checkpoint on. Raises `Refused` when stopped, after a last checkpoint; for a broken one; and where
    another process is at the same job.
    """
    alone = _alone(ctx)
    step, value = 0, 1
    if ctx.resume and ctx.work is not None:
        step, value = _read(ctx, ctx.resume)
    while step < spec.steps:
        if ctx.should_stop():
            if spec.steps_per_save and ctx.work is not None:
                _save(ctx, step, value)
            ctx.check()
        step += 1
        value = after(value, step)
        if spec.step_s:
            time.sleep(spec.step_s)
        ctx.emit(JobStage("counting", step, spec.steps))
        if spec.steps_per_save and step % spec.steps_per_save == 0 and ctx.work is not None:
            ctx.emit(JobMetric("train", step, float(value % 1000)))
            _save(ctx, step, value)
    if ctx.output is not None and not ctx.output.exists():
        scratch = make_scratch(ctx.output)
        (scratch / FILE).write_text(json.dumps({"steps": step, "value": value}))
        publish(scratch, ctx.output)
    if alone is not None:
        alone.close()
    return JobDone(output=str(ctx.output or ""), summary=f"{step} steps: {value}")


def after(value: int, step: int) -> int:
    """The number after one more step."""
    return (value * 48271 + step) % _MODULUS


def _alone(ctx: JobContext) -> IO[bytes] | None:
    """A lock that ends with this process."""
    if ctx.work is None:
        return None
    file = open(ctx.work / "lock", "wb")  # noqa: SIM115  (held while the job runs)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refuse(ErrorCode.CONFLICT, "another process is at this job") from None
    return file


def _save(ctx: JobContext, step: int, value: int) -> None:
    assert ctx.work is not None
    part = ctx.work / ".step.part"
    part.write_text(json.dumps([step, value]))
    part.rename(ctx.work / f"step-{step}.json")
    ctx.emit(JobSaved(f"step-{step}.json", step))


def _read(ctx: JobContext, name: str) -> tuple[int, int]:
    assert ctx.work is not None
    try:
        step, value = json.loads((ctx.work / name).read_text())
        return int(step), int(value)
    except (OSError, ValueError, TypeError) as error:
        raise refuse(ErrorCode.CONFLICT, f"the checkpoint {name} cannot be read: {error}") from None
