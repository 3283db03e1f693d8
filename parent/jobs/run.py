"""Run one job worker to its end: launch, events, cancel, and a failure that says why."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

from parent.jobs.quoting import last_words, shown, without_queries
from parent.workers import launcher
from parent.workers.channel import Channel
from parent.workers.process import Process
from parent.workers.states import Limits
from parent.workers.supervisor import wire_mismatch
from shared import control
from shared.errors import ErrorCode, Failure, Refused
from shared.jobs import JobDone, JobEvent, JobSpec

SILENCE_S = 30.0
"""Job workers send a heartbeat every second: one that is silent for so long is stopped or hangs."""


async def run_job(
    spec: JobSpec,
    output: str | os.PathLike[str],
    *,
    job_id: str = "",
    on_event: Callable[[JobEvent], None] = lambda _: None,
    on_fault: Callable[[Failure], None] = lambda _: None,
    worker_command: list[str] | None = None,
    worker_env: dict[str, str] | None = None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    silence_s: float = SILENCE_S,
) -> JobDone:
    """What the job made, once its worker has left. `on_event` gets each event, the last one included; `on_fault` the
    reason when a worker that does not start, or says nothing for `silence_s`, is about to be ended.

    Raises `Refused` with the job's own failure, or with how its process ended. When the caller is cancelled
    (SIGINT under `asyncio.run`) the worker is told, terminated, killed, and gone before this returns.
    """
    environment = launcher.worker_environment(worker_env or {})
    launch = control.LaunchJob(job_id=job_id or uuid.uuid4().hex, spec=spec, output=os.fspath(output))
    try:
        process, control_end = launcher.start(
            worker_command or launcher.default_command(),
            environment=environment,
            socket_path=None,
            ids={"job": launch.job_id},
            clean=without_queries,
        )
    except OSError as error:
        said = f"the job's worker could not be started: {error}"
        raise Refused(Failure(ErrorCode.ENGINE_UNAVAILABLE, said)) from None
    job = _Job(launch, on_event)
    job.channel = channel = Channel(job.message)
    await channel.open(control_end)
    try:
        fault = await _watch(process, job, limits, silence_s)
        if fault is not None:
            job.failure = job.failure or fault
            on_fault(fault)
            if job.greeted.done():
                process.signal(signal.SIGUSR1)  # where it hangs, into its last words
    finally:
        await asyncio.shield(_end(process, channel, limits))
    code = process.exited.result()
    if job.done is not None:
        return job.done
    if job.failure is not None:
        raise Refused(job.failure)
    words = last_words(process.tail())
    said = f"the job's worker {launcher.describe_exit(code)} before it was done{words and f': {words}'}"
    raise Refused(Failure(ErrorCode.ENGINE_UNAVAILABLE, said))


class _Job:
    """What the messages of one job worker add up to."""

    def __init__(self, launch: control.LaunchJob, on_event: Callable[[JobEvent], None]) -> None:
        loop = asyncio.get_running_loop()
        self.launch = launch
        self.channel: Channel | None = None
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()  # it has told its end, and may leave
        self.heard_at = loop.time()
        self.done: JobDone | None = None
        self.failure: Failure | None = None
        self._loop = loop
        self._on_event = on_event

    def message(self, message: control.FromWorker) -> None:
        self.heard_at = self._loop.time()
        match message:
            case control.Hello():
                if not self.greeted.done():
                    self.greeted.set_result(None)
                self.failure = wire_mismatch(message)
                if self.channel is not None:
                    self.channel.send(self.launch if self.failure is None else control.Shutdown())
            case control.JobUpdate(event=event):
                if isinstance(event, JobDone):
                    self.done = event
                    self._end()
                self._on_event(event)
            case control.Fatal(failure=failure):
                self.failure = self.failure or shown(failure)
                self._end()
            case _:
                pass  # a heartbeat: it lives

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _watch(process: Process, job: _Job, limits: Limits, silence_s: float) -> Failure | None:
    """Returns when the process has left (None), has told its end and does not leave (None), or has a fault."""
    loop = asyncio.get_running_loop()
    while not process.exited.done():
        patience = limits.hello_s if not job.greeted.done() else silence_s
        if job.ended.done():
            patience = limits.stop_grace_s
        left = job.heard_at + patience - loop.time()
        if left > 0:
            news: set[asyncio.Future[Any]] = {job.greeted, job.ended}
            waiting = {process.exited, *(future for future in news if not future.done())}
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        elif job.ended.done():
            return None
        elif not job.greeted.done():
            said = f"the job's worker did not say hello in {limits.hello_s:g} s"
            return Failure(ErrorCode.ENGINE_UNAVAILABLE, said)
        else:
            said = f"the job's worker said nothing for {silence_s:g} s and was ended"
            return Failure(ErrorCode.ENGINE_UNAVAILABLE, said)
    return None


async def _end(process: Process, channel: Channel, limits: Limits) -> None:
    """The stop ladder, where the process has not left by itself; then its last words."""
    if not process.exited.done():
        channel.send(control.Cancel())
        for step in (signal.SIGTERM, signal.SIGKILL):
            await asyncio.wait({process.exited}, timeout=limits.stop_grace_s)
            if process.exited.done():
                break
            process.signal(step)
        await process.exited
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await channel.closed.wait()
    channel.close()
    await process.output_ended(0.5)
