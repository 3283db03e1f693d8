"""Run one job worker to its end: launch, events, cancel, and a failure that says why."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

from parent.workers import launcher
from parent.workers.channel import Channel
from parent.workers.states import Limits
from parent.workers.supervisor import wire_mismatch
from shared import control
from shared.errors import ErrorCode, Failure, Refused
from shared.jobs import JobDone, JobEvent, JobSpec


async def run_job(
    spec: JobSpec,
    output: str | os.PathLike[str],
    *,
    on_event: Callable[[JobEvent], None] = lambda _: None,
    worker_command: list[str] | None = None,
    worker_env: dict[str, str] | None = None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
) -> JobDone:
    """What the job made, once its worker has left. `on_event` gets each event, the last one included.

    Raises `Refused` with the job's own failure, or with how its process ended. When the caller is cancelled
    (SIGINT under `asyncio.run`) the worker is told, terminated, killed, and gone before this returns.
    """
    environment = launcher.worker_environment(worker_env or {})
    try:
        process, control_end = launcher.start(
            worker_command or launcher.default_command(), environment=environment, socket_path=None
        )
    except OSError as error:
        said = f"the job's worker could not be started: {error}"
        raise Refused(Failure(ErrorCode.ENGINE_UNAVAILABLE, said)) from None
    job = _Job(control.LaunchJob(job_id=uuid.uuid4().hex, spec=spec, output=os.fspath(output)), on_event)
    job.channel = channel = Channel(job.message)
    await channel.open(control_end)
    try:
        first: list[asyncio.Future[Any]] = [process.exited, job.greeted]
        await asyncio.wait(first, timeout=limits.hello_s, return_when=asyncio.FIRST_COMPLETED)
        if job.greeted.done() or process.exited.done():
            await process.exited
        else:
            said = f"the job's worker did not say hello in {limits.hello_s:g} s"
            job.failure = Failure(ErrorCode.ENGINE_UNAVAILABLE, said)
    finally:
        await asyncio.shield(_end(process, channel, limits))
    code = process.exited.result()
    if job.failure is not None:
        raise Refused(job.failure)
    if job.done is None:
        tail = process.tail()
        last = f": {tail[-1]}" if tail else ""
        said = f"the job's worker {launcher.describe_exit(code)} before it was done{last}"
        raise Refused(Failure(ErrorCode.ENGINE_UNAVAILABLE, said))
    return job.done


class _Job:
    """What the messages of one job worker add up to."""

    def __init__(self, launch: control.LaunchJob, on_event: Callable[[JobEvent], None]) -> None:
        self.launch = launch
        self.channel: Channel | None = None
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: JobDone | None = None
        self.failure: Failure | None = None
        self._on_event = on_event

    def message(self, message: control.FromWorker) -> None:
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
                self._on_event(event)
            case control.Fatal(failure=failure):
                self.failure = self.failure or failure
            case _:
                pass  # heartbeats and the like


async def _end(process: launcher.Process, channel: Channel, limits: Limits) -> None:
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
