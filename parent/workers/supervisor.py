"""The one owner of one worker: an event goes into table W, its effects come out and are performed here.

Everything runs on the event loop. The rest of the parent looks at `state`, `client` and `view()`,
calls `want`, `unwant`, `restart` and `stop`, and is told of every change through `on_change`.
"""

import asyncio
import contextlib
import contextvars
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from parent.workers import launcher
from parent.workers.channel import Channel
from parent.workers.client import WorkerClient
from parent.workers.states import Effect, Event, IllegalTransition, Lifecycle, Limits, Signal, State
from parent.workers.watchdog import Verdict, Watchdog
from shared import control, wire
from shared.errors import ErrorCode, Failure
from shared.logs import event
from shared.version import VERSION, WIRE

log = logging.getLogger(__name__)
_SIGNALS = {
    Effect.DUMP_STACKS: signal.SIGUSR1,
    Effect.TERMINATE: signal.SIGTERM,
    Effect.KILL: signal.SIGKILL,
}


class Supervisor:
    """Runs the worker of one model."""

    def __init__(
        self,
        launch: control.LaunchModel,
        *,
        command: list[str],
        environment: dict[str, str],
        runtime_dir: Path,
        limits: Limits,
        heartbeat_s: float = 5.0,
        hung_s: float = 120.0,
        name: str = "w",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.launch = launch
        self.life = Lifecycle(limits)
        self.client: WorkerClient | None = None  # set while the worker is ready or draining
        self.facts: wire.ModelFacts | None = None
        self.stats = wire.WorkerStats()
        self.progress = control.Progress("")
        self.verdict = Verdict.ALIVE
        self.last_exit: launcher.LastExit | None = None
        self.pid: int | None = None
        self.socket_path = ""
        self._command, self._environment = command, environment
        self._runtime_dir, self._name = runtime_dir, name
        self._heartbeat_s, self._hung_s = heartbeat_s, hung_s
        self._on_change = on_change
        self._process: launcher.Process | None = None
        self._channel: Channel | None = None
        self._watchdog: Watchdog | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.Context()  # what a request starts here must not log under its id
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ what others ask

    @property
    def state(self) -> State:
        return self.life.state

    def want(self) -> None:
        """Somebody needs this worker; starts it, or after a spent budget makes the half-open try."""
        self._post(Signal(Event.WANT))

    def unwant(self) -> None:
        """Nobody needs it: drain, then stop."""
        self._post(Signal(Event.UNWANT))

    def restart(self) -> None:
        """An operator's restart: drains a ready worker, forgets failures, starts again."""
        self._post(Signal(Event.RESTART))

    def stop(self) -> None:
        """Leave now; open streams are cut."""
        self._post(Signal(Event.STOP))

    def kill(self) -> None:
        """SIGKILL at once, for a second shutdown signal."""
        self.stop()
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def wake(self) -> None:
        """Everyone in `changed` looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float | None = None) -> None:
        """Returns at the next change of state, or after the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def absent(self) -> None:
        """Returns when no process is left."""
        while self.state is not State.ABSENT:
            await self.changed()
        for task in list(self._tasks):
            await asyncio.wait({task})

    def view(self) -> dict[str, Any]:
        """The state for `/engine` and the event stream."""
        failure = self.life.permanent or self.life.failure
        return {
            "model": self.launch.model_id,
            "state": self.state,
            "health": self.verdict,
            "pid": self.pid,
            "epoch": self.life.epoch,
            "restarts": self.life.restarts.total,
            "socket": self.socket_path or None,
            "progress": self.progress if self.state is State.LOADING else None,
            "reason": failure.message if failure else None,
            "last_exit": self.last_exit,
            "facts": self.facts,
            "stats": self.stats,
        }

    # ------------------------------------------------------------ events in

    def _post(self, happened: Signal) -> None:
        now = time.monotonic()
        before = self.state
        try:
            effects = self.life.handle(happened, now)
        except IllegalTransition as error:
            # Only a confused worker can cause this; the state stands and its deadline will decide.
            event(log, "worker.illegal", level=logging.ERROR, model=self.launch.model_id, error=str(error))
            return
        for effect in effects:
            self._perform(effect)
        self._arm(now)
        if self.state is not before:
            self._moved(before, happened)

    def _moved(self, before: State, happened: Signal) -> None:
        event(
            log,
            "worker.state",
            model=self.launch.model_id,
            state=self.state.value,
            was=before.value,
            on=happened.event.value,
            epoch=self.life.epoch,
            pid=self.pid,
            reason=happened.failure.message if happened.failure else "",
        )
        if self.state is State.READY:
            self._watchdog = Watchdog(self._heartbeat_s, self._hung_s, time.monotonic())
            self._watching = self._task(self._watch(self.life.epoch, self._watchdog))
        elif before is State.READY and self._watching is not None:
            self._watching.cancel()
        self.wake()
        self._on_change()

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.life.deadline_at is not None:
            delay = max(0.0, self.life.deadline_at - now)
            self._timer = asyncio.get_running_loop().call_later(
                delay, self._deadline, self.life.deadline_at, context=self._context
            )

    def _deadline(self, due_at: float) -> None:
        late_s = time.monotonic() - due_at
        if (
            late_s > 5.0 and self.state is not State.BACKOFF
        ):  # the machine slept: give everyone his time again
            self.life.deadline_at = time.monotonic() + 5.0
            self._arm(time.monotonic())
            return
        self._post(Signal(Event.DEADLINE, self._overdue()))

    def _overdue(self) -> Failure | None:
        seconds = time.monotonic() - self.life.since
        if self.state is State.SPAWNING:
            return Failure(ErrorCode.ENGINE_UNAVAILABLE, f"the worker did not say hello in {seconds:.0f} s")
        if self.state is State.LOADING:
            return Failure(
                ErrorCode.ENGINE_UNAVAILABLE,
                f"loading stalled in stage {self.progress.stage or 'start'!r} after {seconds:.0f} s",
            )
        return None

    def _message(self, epoch: int, message: control.FromWorker) -> None:
        if epoch != self.life.epoch:
            return
        match message:
            case control.Hello():
                self._post(Signal(Event.HELLO, wire_mismatch(message)))
            case control.Progress():
                self.progress = message
                self._post(Signal(Event.PROGRESS))
                self._on_change()
            case control.Ready():
                if self.state is State.LOADING:
                    self.facts = message.facts
                    self.client = WorkerClient(self.socket_path)
                self._post(Signal(Event.READY))
            case control.Heartbeat():
                self.stats = message.stats
                if self._watchdog is not None:
                    self._watchdog.heartbeat(message.busy_s, time.monotonic())
                self._post(Signal(Event.HEARTBEAT))
            case control.Drained():
                self._post(Signal(Event.DRAINED))
            case control.Fatal():
                self._post(Signal(Event.FATAL, message.failure))
            case control.JobUpdate():
                pass  # a model worker has no job

    async def _watch(self, epoch: int, watchdog: Watchdog) -> None:
        while self.life.epoch == epoch and self.state is State.READY:
            await asyncio.sleep(watchdog.interval_s)
            now = time.monotonic()
            verdict = watchdog.check(now)
            if verdict is not self.verdict:
                self.verdict = verdict
                self._on_change()
            if verdict is Verdict.HUNG:
                reason = f"the worker hangs: {watchdog.reason(now)}"
                self._post(Signal(Event.DEADLINE, Failure(ErrorCode.ENGINE_UNAVAILABLE, reason)))

    # ------------------------------------------------------------ effects out

    def _perform(self, effect: Effect) -> None:
        if effect is Effect.SPAWN:
            self._task(self._run(self.life.epoch))
        elif effect is Effect.LAUNCH:
            self._send(self.launch)
        elif effect is Effect.DRAIN:
            self._send(control.Drain())
        elif effect is Effect.SHUTDOWN:
            self._send(control.Shutdown())
        elif effect is Effect.CUT:
            if self.client is not None:
                self.client.close()
                self.client = None
        elif effect is Effect.RECLAIM:
            self._task(self._reclaim(self.life.epoch))
        elif self._process is not None:
            self._process.signal(_SIGNALS[effect])

    def _send(self, message: control.ToWorker) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, epoch: int) -> None:
        """One process from spawn to exit."""
        self.facts, self.stats, self.verdict = None, wire.WorkerStats(), Verdict.ALIVE
        self.progress = control.Progress("start")
        path = self._runtime_dir / f"{self._name}-{epoch}.sock"
        try:
            process, control_end = launcher.start(
                self._command, environment=self._environment, socket_path=path
            )
        except OSError as error:
            failure = Failure(ErrorCode.ENGINE_UNAVAILABLE, f"the worker could not be started: {error}")
            self._post(Signal(Event.EXIT, failure))
            return
        self._process, self.pid, self.socket_path = process, process.pid, str(path)
        self._channel = channel = Channel(lambda message: self._message(epoch, message))
        await channel.open(control_end)
        if self.state is not State.SPAWNING:  # stopped while it was being spawned
            channel.send(control.Shutdown())
        self._on_change()
        code = await self._ended(process, channel)
        said = f"the worker {launcher.describe_exit(code)}"
        self._post(Signal(Event.EXIT, Failure(ErrorCode.ENGINE_UNAVAILABLE, said), code))

    async def _ended(self, process: launcher.Process, channel: Channel) -> int:
        """The exit code, once the last message is read too. A worker that hung up but lives has to go."""
        hung_up = asyncio.ensure_future(channel.closed.wait())
        either: list[asyncio.Future[Any]] = [process.exited, hung_up]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not process.exited.done():
            await asyncio.wait({process.exited}, timeout=1.0)
            if not process.exited.done() and self.state is not State.STOPPING:
                self._post(
                    Signal(
                        Event.FATAL,
                        Failure(ErrorCode.ENGINE_UNAVAILABLE, "the worker closed its control channel"),
                    )
                )
        code = await process.exited
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the other end open
            async with asyncio.timeout(0.5):
                await hung_up
        hung_up.cancel()
        return code

    async def _reclaim(self, epoch: int) -> None:
        """Clear away what the process left: its group, its socket, its output."""
        code, tail = None, list[str]()
        if self._process is not None:
            self._process.signal(signal.SIGKILL)  # grandchildren
            code = self._process.exited.result()
            await self._process.output_ended(0.5)
            tail = self._process.tail()
        if self._channel is not None:
            self._channel.close()
        launcher.remove_socket(self.socket_path)
        reason = (
            self.life.failure.message if self.life.failure else f"stopped ({launcher.describe_exit(code)})"
        )
        name = launcher.signal_name(code)
        self.last_exit = launcher.LastExit(code, name, reason, tail, epoch)
        self._process = self._channel = self._watchdog = None
        self.pid, self.socket_path = None, ""
        event(log, "worker.exit", model=self.launch.model_id, code=code, reason=reason, epoch=epoch)
        self._post(Signal(Event.MEASURED))


def wire_mismatch(hello: control.Hello) -> Failure | None:
    if hello.wire == WIRE:
        return None
    return Failure(
        ErrorCode.WIRE_MISMATCH,
        f"the worker is mlxd {hello.version} (wire {hello.wire}), this is mlxd {VERSION} (wire {WIRE}); "
        "reinstall so that both are of one version",
    )
