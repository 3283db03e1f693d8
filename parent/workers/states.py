"""Table W: the life of a model worker, as data. Pure: time comes in as an argument, effects go out as names.

`python -m parent.workers.states` prints the table as Markdown. Rows of one (state, event) are tried in order;
the first whose guard holds wins. An event that the table does not list raises `IllegalTransition`. `want` and
`unwant` are levels: legal everywhere, listed only where they also move. Telemetry only re-arms deadlines.
Events of an older epoch are dropped before they reach this file.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from parent import state_table
from parent.workers.restarts import RestartBudget
from shared.control import ExitCode
from shared.errors import ErrorCode, Failure


class State(StrEnum):
    """Where a worker is in its life."""

    ABSENT = "absent"
    SPAWNING = "spawning"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    RECLAIMING = "reclaiming"
    BACKOFF = "backoff"
    FAILED = "failed"  # a permanent fault: starting again would end the same way
    EXHAUSTED = "exhausted"  # the restart budget is spent


class Event(StrEnum):
    """What can happen to a worker."""

    WANT = "want"
    UNWANT = "unwant"
    STOP = "stop"  # unwant, and leave now
    RESTART = "restart"  # an operator's
    ADOPTED = "adopted"  # a ready worker of an earlier parent
    HELLO = "hello"
    PROGRESS = "progress"
    READY = "ready"
    HEARTBEAT = "heartbeat"
    DRAINED = "drained"
    FATAL = "fatal"
    EXIT = "exit"
    MEASURED = "measured"  # its process group, socket and output are cleared away
    DEADLINE = "deadline"


class Effect(StrEnum):
    """What the supervisor has to do; performed in the order given."""

    SPAWN = "spawn"
    LAUNCH = "send launch"
    DRAIN = "send drain"
    SHUTDOWN = "send shutdown"
    DUMP_STACKS = "dump stacks"
    TERMINATE = "terminate"
    KILL = "kill"
    CUT = "cut streams"  # their requests see the worker as lost
    RECLAIM = "reclaim"


class Signal(msgspec.Struct, frozen=True):
    """One event with what it carries: the failure of a fatal, mismatch or deadline; the code of an exit; the
    epoch of an adopted worker.
    """

    event: Event
    failure: Failure | None = None
    exit_code: int | None = None  # negative: died by that signal; None: never ran, or nobody knows
    epoch: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Every deadline of the table, in seconds."""

    hello_s: float = 10.0
    load_stall_s: float = 60.0
    load_total_s: float = 900.0
    drain_s: float = 30.0
    stop_grace_s: float = 3.0
    reclaim_s: float = 10.0
    half_open_s: float = 60.0
    restart_budget: int = 3
    restart_window_s: float = 60.0


STACKS_S = 0.5
"""Between the request for its stacks and the end of a hung worker."""

CLEAR_S = 2.0
"""More than `reclaim_s`: for the last output of a process that is gone."""


class IllegalTransition(Exception):
    """An event that the table does not list for the present state."""


class Lifecycle:
    """One worker's state, and what the guards look at. `handle` moves it; nothing else does."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = State.ABSENT
        self.wanted = False
        self.epoch = 0  # number of the spawn
        self.deadline_at: float | None = None
        self.since = 0.0  # when the present state began
        self.permanent: Failure | None = None
        self.failure: Failure | None = None  # why the present process has to go
        self.restarts = RestartBudget(limits.restart_budget, limits.restart_window_s)
        self.restarting = False  # an operator's wish, until the next spawn
        self.half_open = False  # the one try after the budget was spent, until ready
        self.half_open_at = 0.0
        self.rung = 0  # of the stop ladder: 0 asked, 1 terminated, 2 killed

    @property
    def failed(self) -> bool:
        """True when the present or last process had to go for a fault, not by a wish."""
        return self.failure is not None

    def handle(self, signal: Signal, now: float) -> tuple[Effect, ...]:
        """Take one event. Returns what to do. Raises `IllegalTransition`; the state is then unchanged."""
        rows = TABLE.get((self.state, signal.event))
        if rows is None:
            if signal.event not in (Event.WANT, Event.UNWANT):
                raise IllegalTransition(f"{signal.event} while {self.state}")
            self.wanted = signal.event is Event.WANT
            return ()
        self._note(signal, now)
        for row in rows:
            if not row.guard or GUARDS[row.guard](self, now):
                self._enter(row, signal, now)
                return row.effects
        raise IllegalTransition(f"{signal.event} while {self.state}: no guard holds")

    def _note(self, signal: Signal, now: float) -> None:
        """What an event says, whatever the state."""
        event = signal.event
        if event is Event.WANT:
            self.wanted = True
        elif event in (Event.UNWANT, Event.STOP):
            self.wanted = False
        elif event is Event.RESTART:
            self.wanted = self.restarting = True
            self.permanent = None
            self.restarts.reset()
        elif event is Event.ADOPTED:
            self.wanted = True
            self.epoch = max(self.epoch, signal.epoch)
            self.failure = None
            self.rung = 0
            self.restarts.spawned(now, is_restart=False)
        elif event is Event.EXIT:
            if self.state is State.STOPPING and not self.failed:
                return  # it left because it was told to
            self.restarts.died(now)
            if signal.exit_code in PERMANENT_EXITS and not self.restarting and self.permanent is None:
                code, says = PERMANENT_EXITS[signal.exit_code]
                told = self.failure.message if self.failure else f"the worker left: {says}"
                self.permanent = Failure(code, told)
        if signal.failure is not None and self.failure is None:
            self.failure = signal.failure
        if signal.failure is not None and signal.failure.is_permanent and not self.restarting:
            self.permanent = signal.failure

    def _enter(self, row: "Row", signal: Signal, now: float) -> None:
        came_from, self.state = self.state, row.target
        if came_from is not self.state:
            self.since = now
        limits = self.limits
        match self.state:
            case State.SPAWNING:
                self.epoch += 1
                is_restart = came_from is State.BACKOFF and self.failed and not self.restarting
                self.restarts.spawned(now, is_restart=is_restart)
                self.half_open = came_from is State.EXHAUSTED
                self.failure, self.restarting, self.rung = None, False, 0
                self.deadline_at = now + limits.hello_s
            case State.LOADING:
                if signal.event is not Event.HEARTBEAT:
                    self.deadline_at = min(now + limits.load_stall_s, self.since + limits.load_total_s)
            case State.READY:
                self.half_open, self.permanent = False, None  # what it failed of before is mended
                self.deadline_at = None  # the watchdog's business
            case State.DRAINING:
                if came_from is not self.state:
                    self.deadline_at = now + limits.drain_s
            case State.STOPPING:
                self._climb(row, now, came_from is not self.state)
            case State.RECLAIMING:
                self.deadline_at = now + limits.reclaim_s + CLEAR_S
            case State.BACKOFF:
                waits = self.failed and not self.restarting
                self.deadline_at = now + (self.restarts.delay_s if waits else 0.0)
            case State.EXHAUSTED:
                if came_from is not self.state:
                    self.half_open_at = now + limits.half_open_s
                    self.deadline_at = self.half_open_at
                elif signal.event is Event.DEADLINE:
                    self.deadline_at = None  # half-open: the next who wants it makes it try
            case State.FAILED:
                self.deadline_at = None
            case State.ABSENT:
                self.deadline_at, self.permanent = None, None  # the next who wants it begins anew

    def _climb(self, row: "Row", now: float, arrived: bool) -> None:
        """The stop ladder: asked (a hung worker for its stacks), terminated, killed, and killed again."""
        wait = self.limits.stop_grace_s
        if Effect.KILL in row.effects:
            self.rung = 2
        elif Effect.TERMINATE in row.effects:
            self.rung = 1
        elif Effect.DUMP_STACKS in row.effects:
            wait = STACKS_S
        elif arrived:
            wait /= 3
        else:
            return  # a late message moves no deadline
        self.deadline_at = now + wait


PERMANENT_EXITS: dict[int | None, tuple[ErrorCode, str]] = {
    ExitCode.WIRE: (ErrorCode.WIRE_MISMATCH, "it refused the launch record (exit code 2)"),
    ExitCode.CHECKPOINT: (ErrorCode.BAD_CHECKPOINT, "the checkpoint cannot be loaded (exit code 3)"),
    ExitCode.CANNOT_FIT: (ErrorCode.CANNOT_FIT, "the model does not fit in memory (exit code 4)"),
}

GUARDS: dict[str, Callable[[Lifecycle, float], bool]] = {
    "wire equal": lambda life, now: not life.failed,
    "not wanted": lambda life, now: not life.wanted,
    "permanent": lambda life, now: life.permanent is not None,
    "an operator's restart": lambda life, now: life.restarting,
    "nothing failed": lambda life, now: not life.failed,
    "budget left": lambda life, now: not life.half_open and not life.restarts.is_spent(now),
    "half-open": lambda life, now: now >= life.half_open_at,
    "first rung": lambda life, now: life.rung == 0,
}


class Row(NamedTuple):
    """One line of the table."""

    target: State
    guard: str = ""  # a name in `GUARDS`; "" always holds
    effects: tuple[Effect, ...] = ()
    note: str = ""


_ASK = (Effect.SHUTDOWN,)
_ASK_AND_CUT = (Effect.SHUTDOWN, Effect.CUT)
_FORCE = (Effect.DUMP_STACKS, Effect.CUT)
_LEAVE = (Row(State.STOPPING, effects=_ASK, note="begin the stop ladder"),)
_GONE = (Row(State.RECLAIMING, effects=(Effect.CUT, Effect.RECLAIM), note="record the exit; requeue"),)
_LATE = (Row(State.STOPPING, note="late; ignored"),)
_AFTER = (
    Row(State.ABSENT, "not wanted"),
    Row(State.FAILED, "permanent", note="answer waiters with the reason"),
    Row(State.BACKOFF, "an operator's restart", note="no delay"),
    Row(State.BACKOFF, "nothing failed", note="no delay"),
    Row(State.BACKOFF, "budget left", note="delay 0, then 1, 2, 4 … 30 s from the second early death"),
    Row(State.EXHAUSTED, note="answer waiters with the reason"),
)
_AGAIN = (Row(State.SPAWNING, effects=(Effect.SPAWN,), note="epoch + 1"),)

TABLE: dict[tuple[State, Event], tuple[Row, ...]] = {
    (State.ABSENT, Event.WANT): _AGAIN,
    (State.ABSENT, Event.RESTART): _AGAIN,
    (State.ABSENT, Event.ADOPTED): (Row(State.READY, note="its epoch goes on; wake waiters"),),
    (State.ABSENT, Event.STOP): (Row(State.ABSENT),),
    (State.SPAWNING, Event.HELLO): (
        Row(State.LOADING, "wire equal", (Effect.LAUNCH,)),
        Row(State.STOPPING, effects=_ASK, note="permanent: wire mismatch"),
    ),
    (State.SPAWNING, Event.FATAL): _LEAVE,
    (State.SPAWNING, Event.UNWANT): _LEAVE,
    (State.SPAWNING, Event.STOP): _LEAVE,
    (State.SPAWNING, Event.RESTART): _LEAVE,
    (State.SPAWNING, Event.EXIT): _GONE,
    (State.SPAWNING, Event.DEADLINE): (Row(State.STOPPING, effects=_FORCE, note="no hello"),),
    (State.LOADING, Event.PROGRESS): (Row(State.LOADING, note="re-arm the stall deadline"),),
    (State.LOADING, Event.HEARTBEAT): (Row(State.LOADING),),
    (State.LOADING, Event.READY): (Row(State.READY, note="wake waiters"),),
    (State.LOADING, Event.FATAL): _LEAVE,
    (State.LOADING, Event.UNWANT): _LEAVE,
    (State.LOADING, Event.STOP): _LEAVE,
    (State.LOADING, Event.RESTART): _LEAVE,
    (State.LOADING, Event.EXIT): _GONE,
    (State.LOADING, Event.DEADLINE): (Row(State.STOPPING, effects=_FORCE, note="load stalled"),),
    (State.READY, Event.HEARTBEAT): (Row(State.READY, note="feed the watchdog"),),
    (State.READY, Event.PROGRESS): (Row(State.READY),),
    (State.READY, Event.UNWANT): (Row(State.DRAINING, effects=(Effect.DRAIN,), note="stop granting"),),
    (State.READY, Event.RESTART): (Row(State.DRAINING, effects=(Effect.DRAIN,), note="stop granting"),),
    (State.READY, Event.STOP): (Row(State.STOPPING, effects=_ASK_AND_CUT),),
    (State.READY, Event.FATAL): (Row(State.STOPPING, effects=_ASK_AND_CUT, note="engine fault"),),
    (State.READY, Event.EXIT): _GONE,
    (State.READY, Event.DEADLINE): (Row(State.STOPPING, effects=_FORCE, note="hung"),),
    (State.DRAINING, Event.HEARTBEAT): (Row(State.DRAINING),),
    (State.DRAINING, Event.DRAINED): (Row(State.STOPPING, effects=_ASK),),
    (State.DRAINING, Event.FATAL): (Row(State.STOPPING, effects=_ASK_AND_CUT),),
    (State.DRAINING, Event.STOP): (Row(State.STOPPING, effects=_ASK_AND_CUT),),
    (State.DRAINING, Event.RESTART): (Row(State.DRAINING),),
    (State.DRAINING, Event.EXIT): _GONE,
    (State.DRAINING, Event.DEADLINE): (
        Row(State.STOPPING, effects=_ASK_AND_CUT, note="streams that remain are cut"),
    ),
    (State.STOPPING, Event.HELLO): _LATE,
    (State.STOPPING, Event.PROGRESS): _LATE,
    (State.STOPPING, Event.READY): _LATE,
    (State.STOPPING, Event.HEARTBEAT): _LATE,
    (State.STOPPING, Event.DRAINED): _LATE,
    (State.STOPPING, Event.FATAL): _LATE,
    (State.STOPPING, Event.STOP): _LATE,
    (State.STOPPING, Event.RESTART): _LATE,
    (State.STOPPING, Event.EXIT): _GONE,
    (State.STOPPING, Event.DEADLINE): (
        Row(State.STOPPING, "first rung", (Effect.TERMINATE, Effect.CUT)),
        Row(State.STOPPING, effects=(Effect.KILL, Effect.CUT)),
    ),
    (State.RECLAIMING, Event.RESTART): (Row(State.RECLAIMING),),
    (State.RECLAIMING, Event.STOP): (Row(State.RECLAIMING),),
    (State.RECLAIMING, Event.MEASURED): _AFTER,
    (State.RECLAIMING, Event.DEADLINE): _AFTER,
    (State.BACKOFF, Event.UNWANT): (Row(State.ABSENT),),
    (State.BACKOFF, Event.STOP): (Row(State.ABSENT),),
    (State.BACKOFF, Event.RESTART): (Row(State.BACKOFF, note="no delay"),),
    (State.BACKOFF, Event.DEADLINE): _AGAIN,
    (State.FAILED, Event.WANT): (Row(State.FAILED, note="refuse at once with the recorded reason"),),
    (State.FAILED, Event.UNWANT): (Row(State.ABSENT),),
    (State.FAILED, Event.STOP): (Row(State.ABSENT),),
    (State.FAILED, Event.RESTART): (Row(State.BACKOFF, note="forget the failure"),),
    (State.EXHAUSTED, Event.WANT): (
        Row(State.SPAWNING, "half-open", (Effect.SPAWN,), "one try"),
        Row(State.EXHAUSTED, note="refuse at once with the recorded reason"),
    ),
    (State.EXHAUSTED, Event.UNWANT): (Row(State.ABSENT),),
    (State.EXHAUSTED, Event.STOP): (Row(State.ABSENT),),
    (State.EXHAUSTED, Event.RESTART): (Row(State.BACKOFF, note="forget the failures"),),
    (State.EXHAUSTED, Event.DEADLINE): (Row(State.EXHAUSTED, note="half-open: the next want may try"),),
}


def markdown() -> str:
    """The table for the architecture page."""
    return state_table.markdown(
        (state, event, row.guard, row.target, " · ".join([*row.effects, *([row.note] if row.note else [])]))
        for (state, event), rows in TABLE.items()
        for row in rows
    )


if __name__ == "__main__":
    print(markdown())
