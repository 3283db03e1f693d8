"""The one owner of one worker: an event goes into table W, its effects come out and are performed here.

Everything runs on the event loop. The rest of the parent looks at `state`, `client` and `view()`,
calls `want`, `unwant`, `restart`, `stop` and `adopt`, and is told of every change through `on_change`.
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

from msgspec.structs import replace

from parent.workers import adoption, checkup, launcher, spawned
from parent.workers.client import WorkerClient
from parent.workers.memory import Balance, Memory, SystemMemory, Tracker
from parent.workers.process import is_stopped
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import Effect, Event, IllegalTransition, Lifecycle, Limits, Signal, State
from parent.workers.watchdog import Verdict, Watchdog
from shared import control, wire
from shared.errors import ErrorCode, Failure
from shared.logs import event
from shared.version import VERSION, WIRE

log = logging.getLogger(__name__)


class Supervisor:
    """Runs the worker of one model.

    `launch`, `command` and `environment` may be assigned at any time; they hold from the next spawn. `beside` says
    what other workers hold of the machine's memory, in bytes; it is called from other threads.
    """

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
        memory: Memory | None = None,
        beside: Callable[[], int] = lambda: 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.launch = launch
        self.command, self.environment = command, environment
        self.name = name  # the beginning of its sockets' names
        self.life = Lifecycle(limits)
        self.client: WorkerClient | None = None  # set while the worker is ready or draining
        self.facts: wire.ModelFacts | None = None
        self.stats = wire.WorkerStats()
        self.progress = control.Progress("")
        self.verdict = Verdict.ALIVE
        self.last_exit: launcher.LastExit | None = None
        self.load_s = 0.0  # of the last load, from spawn to ready; 0 = not known
        self.ready_at: float | None = None  # monotonic
        self._spawned_at = 0.0
        self._runtime_dir = runtime_dir
        self._heartbeat_s, self._hung_s = heartbeat_s, hung_s
        self._on_change = on_change
        self._memory = Tracker(Balance(memory or SystemMemory(), beside))
        self._heard = asyncio.Event()
        self._spawned: spawned.Spawned | None = None
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

    @property
    def pid(self) -> int | None:
        return self._spawned.pid if self._spawned else None

    @property
    def socket_path(self) -> str:
        """Of its data channel; "" without a process."""
        return self._spawned.record.socket if self._spawned else ""

    @property
    def running(self) -> control.LaunchModel | None:
        """What the present process was told, which may be older than `launch`."""
        return self._spawned.record.launch if self._spawned else None

    @property
    def footprint_bytes(self) -> int:
        """What the process holds, at the last look; 0 without one."""
        if self.pid is None:
            return 0
        return max(self._memory.balance.footprint_bytes, self.stats.active_bytes + self.stats.cache_bytes)

    @property
    def missing_bytes(self) -> int:
        """What processes that have gone did not give back, as last measured."""
        return self._memory.balance.missing_bytes

    def missing_now(self) -> int:
        """The same, measured again: it shrinks when the machine gets it back."""
        return self._memory.balance.missing_now(self.pid or 0)

    def want(self) -> None:
        """Somebody needs this worker; starts it, or after a spent budget makes the half-open try."""
        self._post(Signal(Event.WANT))

    def unwant(self) -> None:
        """Nobody needs it: drain, then stop."""
        self._post(Signal(Event.UNWANT))

    def resize(self, kv_bytes: int, prefix_cache_bytes: int) -> None:
        """Other caps for the worker that runs."""
        if self._spawned is not None:
            record = self._spawned.record
            caps = {"kv_bytes": kv_bytes, "prefix_cache_bytes": prefix_cache_bytes}
            self._spawned.record = replace(record, launch=replace(record.launch, **caps))
            self.launch = replace(self.launch, **caps)  # after a crash it comes back with no more
            self._spawned.channel.send(control.Resize(**caps))

    def retime(self, limits: Limits, heartbeat_s: float, hung_s: float) -> None:
        """Other deadlines, from the next time each is set."""
        self.life.limits = limits
        self.life.restarts.budget, self.life.restarts.window_s = (
            limits.restart_budget,
            limits.restart_window_s,
        )
        self._heartbeat_s, self._hung_s = heartbeat_s, hung_s

    def restart(self) -> None:
        """An operator's restart: drains a ready worker, forgets failures, starts again."""
        self._post(Signal(Event.RESTART))

    def stop(self) -> None:
        """Leave now; open streams are cut."""
        self._post(Signal(Event.STOP))

    def kill(self) -> None:
        """SIGKILL at once, for a second shutdown signal."""
        self.stop()
        if self._spawned is not None:
            self._spawned.signal(signal.SIGKILL)

    def cut(self) -> None:
        """End every open stream as if the worker were lost; it stays."""
        if self.client is not None:
            self.client.close()
            self.client = WorkerClient(self.socket_path)

    async def check(self, timeout_s: float) -> checkup.Check:
        """Deep health: can its engine compute, now?"""
        return await checkup.check(self, timeout_s)

    async def heartbeat(self) -> None:
        """Returns at the next heartbeat, or when there will be none."""
        await self._heard.wait()

    def record(self) -> RuntimeRecord | None:
        """What a later parent needs to adopt the worker; None while there is none to adopt."""
        if self._spawned is None or self.state not in (State.READY, State.DRAINING):
            return None
        return replace(self._spawned.record, footprint=self.footprint_bytes)

    async def adopt(self, record: RuntimeRecord) -> bool:
        """Take over the worker of an earlier parent: ready at once, its epoch goes on, `name` is the record's.

        False: it cannot be had. Then its process has been ended and its sockets are gone. Only while absent.
        """
        try:
            if self.state is not State.ABSENT:
                raise adoption.NotAdopted(f"the supervisor is {self.state}")
            its, introduction, ready = await spawned.adopt(record)
        except (adoption.NotAdopted, OSError) as error:
            self._log("worker.not_adopted", level=logging.WARNING, pid=record.pid, reason=str(error))
            await adoption.end(record, self.life.limits.stop_grace_s)
            return False
        self._reset()
        self.name, self._spawned = record.name, its
        self.facts, self.client = ready.facts, WorkerClient(record.socket)
        self._post(Signal(Event.ADOPTED, epoch=record.epoch))
        epoch = self.life.epoch
        introduction.hand_over(lambda message: self._message(epoch, message))
        self._task(self._attend(its))
        return True

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
            "load_s": round(self.load_s, 3) or None,
            "footprint_bytes": self.footprint_bytes,
            "missing_bytes": self.missing_bytes,
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
            self._log("worker.illegal", level=logging.ERROR, error=str(error))
            return
        for effect in effects:
            self._perform(effect)
        self._arm(now)
        if self.state is not before:
            self._moved(before, happened)

    def _moved(self, before: State, happened: Signal) -> None:
        self._log(
            "worker.state",
            state=self.state.value,
            was=before.value,
            on=happened.event.value,
            epoch=self.life.epoch,
            pid=self.pid,
            reason=happened.failure.message if happened.failure else "",
        )
        self._beat()
        if self.state is State.READY:
            self.ready_at = time.monotonic()
            if happened.event is Event.READY:
                self.load_s = self.ready_at - self._spawned_at
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
                self._look()
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
                    self._watchdog.heartbeat(message.stats, message.busy_s, time.monotonic())
                self._look()
                self._beat()
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
            if watchdog.is_silent(now):
                self._cure(watchdog, now)
            verdict = watchdog.check(now)
            if verdict is not self.verdict:
                self.verdict = verdict
                self._on_change()
            if verdict is Verdict.HUNG:
                reason = f"the worker hangs: {watchdog.reason(now)}"
                self._post(Signal(Event.DEADLINE, Failure(ErrorCode.ENGINE_UNAVAILABLE, reason)))

    def _cure(self, watchdog: Watchdog, now: float) -> None:
        """A silent worker whose process somebody stopped goes on, if that does not happen again and again."""
        if self._spawned is None or not is_stopped(self._spawned.pid):
            return
        wakes = watchdog.stopped(now)
        self._log("worker.stopped", level=logging.WARNING, pid=self.pid, next="SIGCONT" if wakes else "stop")
        if wakes:
            self._spawned.signal(signal.SIGCONT)

    def _look(self) -> None:
        if self._spawned is not None:
            self._memory.look(self._spawned.pid)

    def _beat(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    # ------------------------------------------------------------ effects out

    def _perform(self, effect: Effect) -> None:
        its = self._spawned
        if effect is Effect.SPAWN:
            self._task(self._run(self.life.epoch))
        elif effect is Effect.RECLAIM:
            self._task(self._reclaim(self.life.epoch))
        elif effect is Effect.CUT:
            if self.client is not None:
                self.client.close()
                self.client = None
        elif its is None:
            pass
        elif effect is Effect.LAUNCH:
            its.channel.send(its.record.launch)
        elif effect is Effect.DRAIN:
            its.channel.send(control.Drain())
        elif effect is Effect.SHUTDOWN:
            its.channel.send(control.Shutdown())
        elif effect is Effect.DUMP_STACKS:
            its.ask_stacks()
        elif effect is Effect.TERMINATE:
            its.signal(signal.SIGTERM, signal.SIGCONT)  # a stopped process takes it when it goes on
        elif effect is Effect.KILL:
            its.signal(signal.SIGKILL)

    def _task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reset(self) -> None:
        self.facts, self.stats, self.verdict = None, wire.WorkerStats(), Verdict.ALIVE
        self.progress = control.Progress("start")
        self.ready_at, self._spawned_at = None, time.monotonic()

    async def _run(self, epoch: int) -> None:
        """One process from spawn to exit."""
        self._reset()
        try:
            its, control_end = spawned.spawn(
                self.launch,
                command=self.command,
                environment=self.environment,
                folder=self._runtime_dir,
                name=self.name,
                epoch=epoch,
                on_message=lambda message: self._message(epoch, message),
            )
        except OSError as error:
            failure = Failure(ErrorCode.ENGINE_UNAVAILABLE, f"the worker could not be started: {error}")
            self._post(Signal(Event.EXIT, failure))
            return
        self._spawned = its
        await its.channel.open(control_end)
        if self.state is not State.SPAWNING:  # stopped while it was being spawned
            its.channel.send(control.Shutdown())
        self._on_change()
        await self._attend(its)

    async def _attend(self, its: spawned.Spawned) -> None:
        """Report the end of a process, once it has come. One that hung up but lives has to go."""

        def hung_up() -> None:
            if self.state is not State.STOPPING:
                said = its.channel.fault or "the worker closed its control channel"
                self._post(Signal(Event.FATAL, Failure(ErrorCode.ENGINE_UNAVAILABLE, said)))

        code = await its.ended(hung_up)
        said = its.channel.fault or f"the worker {launcher.describe_exit(code)}"
        self._post(Signal(Event.EXIT, Failure(ErrorCode.ENGINE_UNAVAILABLE, said), code))

    async def _reclaim(self, epoch: int) -> None:
        """Clear away what the process left, write down how it ended, and see its memory come back."""
        code, tail, stacks = None, list[str](), ""
        if self._spawned is not None:
            its = self._spawned
            await its.clear()
            code, tail, stacks = its.process.exited.result(), its.process.tail(), its.stacks()
        reason = (
            self.life.failure.message if self.life.failure else f"stopped ({launcher.describe_exit(code)})"
        )
        self.last_exit = launcher.LastExit(code, launcher.signal_name(code), reason, tail, epoch)
        self._spawned = self._watchdog = None
        if stacks:
            self._log("worker.stacks", level=logging.WARNING, stacks=stacks)
        self._log("worker.exit", code=code, reason=reason, epoch=epoch)
        held = self._memory.balance.footprint_bytes
        gap = await self._memory.returned(self.life.limits.reclaim_s)
        if gap:
            self._log("worker.memory_missing", level=logging.WARNING, missing_bytes=gap, held_bytes=held)
        self._post(Signal(Event.MEASURED))

    def _log(self, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
        event(log, name, level=level, model=self.launch.model_id, **fields)


def wire_mismatch(hello: control.Hello) -> Failure | None:
    if hello.wire == WIRE:
        return None
    return Failure(
        ErrorCode.WIRE_MISMATCH,
        f"the worker is mlxd {hello.version} (wire {hello.wire}), this is mlxd {VERSION} (wire {WIRE}); "
        "reinstall so that both are of one version",
    )
