"""One job worker, from its start to its end: launch, events, hold, cancel, and a failure that says why."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from parent.jobs.memory_watch import MemoryWatch
from parent.jobs.quoting import last_words, shown, without_queries
from parent.workers import launcher
from parent.workers.channel import Channel
from parent.workers.process import Process
from parent.workers.states import Limits
from parent.workers.supervisor import wire_mismatch
from shared import control
from shared.errors import ErrorCode, Failure, Refused
from shared.jobs import JobDone, JobEvent, JobSpec
from shared.units import format_bytes

SILENCE_S = 30.0
"""Job workers send a heartbeat every second: one that is silent for so long is stopped or hangs."""

LAST_WORDS_S = 0.5


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
    launch = control.LaunchJob(job_id=job_id or uuid.uuid4().hex, spec=spec, output=os.fspath(output))
    worker = await start(
        launch, lambda _, event: on_event(event), worker_command=worker_command, worker_env=worker_env
    )
    return await worker.attend(launch, limits, silence_s, on_fault)


async def start(
    launch: control.LaunchJob,
    on_update: Callable[[int, JobEvent], None],
    *,
    worker_command: list[str] | None = None,
    worker_env: dict[str, str] | None = None,
    adopt_path: Path | None = None,
) -> "JobWorker":
    """A process that waits to be told what to do. `adopt_path`: of the socket at which a later parent finds it.

    Raises `Refused` where it cannot be started.
    """
    try:
        process, control_end = launcher.start(
            worker_command or launcher.default_command(),
            environment=launcher.worker_environment(worker_env or {}),
            socket_path=None,
            adopt_path=adopt_path,
            ids={"job": launch.job_id},
            clean=without_queries,
        )
    except OSError as error:
        said = f"the job's worker could not be started: {error}"
        raise Refused(Failure(ErrorCode.ENGINE_UNAVAILABLE, said)) from None
    worker = JobWorker(process, on_update)
    worker.adopt_path = str(adopt_path or "")
    worker.channel = Channel(worker.message)
    await worker.channel.open(control_end)
    return worker


class JobWorker:
    """One process, whether we have started or adopted it. `attend` it to its end.

    `on_update` gets what it tells, with the number of the update; `peak_bytes` is what it has held at most.
    """

    def __init__(self, process: Process, on_update: Callable[[int, JobEvent], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.process = process
        self.channel: Channel
        self.adopt_path = ""  # of the socket at which a later parent finds it
        self.grace_s: float | None = None  # of each step of the stop ladder, where it is not the usual one
        self.lives_on = False  # when it is attended no more: another parent takes it over
        self.peak_bytes = 0
        self.on_beat: Callable[[], None] = lambda: None  # about once a second, while it lives
        self._on_update = on_update
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()  # it has told its end, and may leave
        self._heard_at = self._loop.time()
        self._done: JobDone | None = None
        self._failure: Failure | None = None
        self._watch = MemoryWatch()
        self._killed = False  # by us
        self._is_launched = self._is_held = False

    def message(self, message: control.FromWorker) -> None:
        """What it says."""
        self._heard_at = self._loop.time()
        match message:
            case control.Hello():
                if not self._greeted.done():
                    self._failure = wire_mismatch(message)
                    self._greeted.set_result(None)
            case control.JobUpdate(event=event, seq=seq):
                if isinstance(event, JobDone):
                    self._done = event
                    self._end_is_told()
                self._on_update(seq, event)
            case control.Heartbeat(stats=stats):
                self.peak_bytes = max(self.peak_bytes, stats.peak_bytes)
                self._watch.look()
                self.on_beat()
            case control.Fatal(failure=failure):
                self._failure = self._failure or shown(failure)
                self._end_is_told()
            case _:
                pass

    def was_adopted(self, adopt_path: str) -> None:
        """It has said hello already, and knows what to do."""
        self.adopt_path = adopt_path
        self._is_launched = True
        self._greeted.set_result(None)

    def say(self, message: control.ToWorker) -> None:
        """One message to it."""
        self.channel.send(message)

    def hold(self, held: bool) -> None:
        """Have it wait before the next step, or take it; from its first step on where it has not been launched yet."""
        self._is_held = held
        if self._is_launched:
            self.say(control.Hold() if held else control.GoOn())

    async def attend(
        self,
        launch: control.LaunchJob | None,
        limits: Limits,
        silence_s: float = SILENCE_S,
        on_fault: Callable[[Failure], None] = lambda _: None,
        before_launch: Callable[[], Awaitable[None]] | None = None,
    ) -> JobDone:
        """As `run_job`. `launch` None: it was told by somebody else. Cancelled while `lives_on`, it is left alone."""
        launching = self._loop.create_task(self._launch(launch, before_launch)) if launch else None
        try:
            fault = await self._fault(limits, silence_s)
            if fault is not None:
                self._failure = self._failure or fault
                on_fault(fault)
                if self._greeted.done():
                    self.process.signal(signal.SIGUSR1)  # where it hangs, into its last words
        finally:
            if launching is not None:
                if not (self.lives_on and self._greeted.done()):
                    launching.cancel()
                await asyncio.gather(launching, return_exceptions=True)
            if not self.lives_on:
                await asyncio.shield(self.end(limits))
        code = self.process.exited.result()
        if self._done is not None:
            return self._done
        raise Refused(self._failure or self._how_it_ended(code))

    async def _launch(
        self, launch: control.LaunchJob, before_launch: Callable[[], Awaitable[None]] | None
    ) -> None:
        await asyncio.shield(self._greeted)
        if self._failure is not None:
            self.say(control.Shutdown())
            return
        try:
            if before_launch is not None:
                await before_launch()
        except Refused as refused:  # it cannot be written down who runs: then nobody shall
            self._failure = refused.failure
            self.say(control.Shutdown())
            return
        self.say(launch)
        self._is_launched = True
        if self._is_held:
            self.say(control.Hold())

    async def _fault(self, limits: Limits, silence_s: float) -> Failure | None:
        """Returns when the process has left (None), has told its end and does not leave (None), or has a fault."""
        exited = self.process.exited
        while not exited.done():
            patience = limits.hello_s if not self._greeted.done() else silence_s
            if self._ended.done():
                patience = limits.stop_grace_s
            left = self._heard_at + patience - self._loop.time()
            if left > 0:
                news: set[asyncio.Future[Any]] = {self._greeted, self._ended}
                waiting = {exited, *(future for future in news if not future.done())}
                await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            elif self._ended.done():
                return None
            elif not self._greeted.done():
                said = f"the job's worker did not say hello in {limits.hello_s:g} s"
                return Failure(ErrorCode.ENGINE_UNAVAILABLE, said)
            else:
                said = f"the job's worker said nothing for {silence_s:g} s and was ended"
                return Failure(ErrorCode.ENGINE_UNAVAILABLE, said)
        return None

    async def end(self, limits: Limits) -> None:
        """The stop ladder, where the process has not left by itself; then its last words."""
        exited = self.process.exited
        if not exited.done():
            self.say(control.Cancel())
            grace_s = limits.stop_grace_s if self.grace_s is None else self.grace_s
            for step in (signal.SIGTERM, signal.SIGKILL):
                await asyncio.wait({exited}, timeout=grace_s)
                if exited.done():
                    break
                self._killed, grace_s = True, limits.stop_grace_s
                self.process.signal(step)
            await exited
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.channel.closed.wait()
        self.channel.close()
        self.process.signal(signal.SIGKILL)  # what it has started and left
        launcher.remove_socket(self.adopt_path)
        await self.process.output_ended(LAST_WORDS_S)

    def _how_it_ended(self, code: int | None) -> Failure:
        words = last_words(self.process.tail())
        how = f"{launcher.describe_exit(code)} before it was done{words and f': {words}'}"
        # Of one that was adopted nobody knows how it ended.
        if code in (-signal.SIGKILL, None) and not self._killed and self._watch.is_short():
            held = f" at {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
            return Failure(ErrorCode.CANNOT_FIT, f"out of memory{held}: the job's worker {how}")
        return Failure(ErrorCode.ENGINE_UNAVAILABLE, f"the job's worker {how}")

    def _end_is_told(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
