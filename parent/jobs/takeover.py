"""What a dead parent left of a job: a process that lives is adopted, one that is dead is read the file of what it told,
and one that can neither be adopted nor left alone is ended. Never two at one job.
"""

import asyncio
import logging

from parent.jobs import record as records
from parent.jobs.quoting import without_queries
from parent.jobs.run import JobWorker
from parent.jobs.runs import Run
from parent.jobs.store import Job
from parent.workers import adoption
from parent.workers.process import is_same
from parent.workers.relay import Relay
from shared import control
from shared.logs import event

log = logging.getLogger(__name__)


async def adopt(job: Job, run: Run) -> JobWorker | None:
    """The process of a job, where it lives and takes us for its parent; None where it does not."""
    record = records.decoded(job.worker) if job.worker else None
    if record is None or not record.adopt_socket or not is_same(record.pid, record.start_time):
        return None
    relay = Relay({"job": job.id, "pid": record.pid}, without_queries)
    introduction = adoption.Introduction(record, control.Hello, relay, job.heard)
    try:
        _, process = await introduction.begin()
    except (adoption.NotAdopted, OSError) as error:
        event(log, "job.not_adopted", level=logging.WARNING, job=job.id, pid=record.pid, reason=str(error))
        return None
    worker = JobWorker(process, run.update)
    worker.channel = introduction.channel
    worker.was_adopted(record.adopt_socket)
    run.take(worker)
    introduction.hand_over(worker.message)
    return worker


async def finish(job: Job, run: Run, grace_s: float) -> None:
    """End the process, if it lives, and take down what it told and nobody heard. The row may be over by that."""
    record = records.decoded(job.worker) if job.worker else None
    if record is not None:
        await adoption.end(record, grace_s)
        messages = await asyncio.to_thread(records.told, run.folder.spool(job.attempt), job.heard)
        await run.recount(messages)
    await asyncio.to_thread(run.folder.tidy, keep=True)
