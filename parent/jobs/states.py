"""Table J: the life of a job, as data. Pure.

`python -m parent.jobs.states` prints it as Markdown. `stopping` carries a verdict, which becomes the state when the
process has left; the first one wins, but a job on its way back (queued, paused) may still be done or cancelled.
An event that the table does not list raises `IllegalTransition`.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from parent import state_table


class State(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # went down with its server again and again


class Event(StrEnum):
    """What can happen to a job."""

    ADMIT = "admit"
    STARTED = "started"
    PROGRESS = "progress"
    DONE = "done"
    YIELDED = "yielded"  # the server needs its place, or leaves
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    EXIT = "exit"
    DEADLINE = "deadline"
    ORPHANED = "orphaned"  # found at start: the server that ran it is dead, and its process is too


TERMINAL = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.LOST})
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
"""With a process, or what a dead server left of one."""


class Facts(NamedTuple):
    """What the guards look at. `transient`: its failure may be gone at another try, and tries are left. `begun`: its
    process was told what to do.
    """

    resumable: bool = False
    transient: bool = False
    deaths_left: bool = True  # of its servers, before it is given up
    verdict: State | None = None
    begun: bool = True


class IllegalTransition(Exception):
    """An event that the table does not list for the present state."""


GUARDS: dict[str, Callable[[Facts], bool]] = {
    "resumable": lambda facts: facts.resumable,
    "nothing begun, server deaths left": lambda facts: not facts.begun and facts.deaths_left,
    "resumable, server deaths left": lambda facts: facts.resumable and facts.deaths_left,
    "transient failure, tries left": lambda facts: facts.transient,
    "verdict is queued or paused": lambda facts: facts.verdict in (State.QUEUED, State.PAUSED),
    "verdict is queued": lambda facts: facts.verdict is State.QUEUED,
    "verdict is paused": lambda facts: facts.verdict is State.PAUSED,
}


class Row(NamedTuple):
    """One line of the table. `target` None: the verdict. `verdict` None: the one there is."""

    target: State | None
    verdict: State | None = None
    guard: str = ""  # a name in `GUARDS`; "" always holds
    note: str = ""


def _stop(verdict: State, guard: str = "", note: str = "") -> Row:
    return Row(State.STOPPING, verdict, guard, note)


_LATE = (Row(State.STOPPING, note="late; ignored"),)
_YIELD = (
    _stop(State.QUEUED, "resumable", "send cancel"),
    _stop(State.FAILED, note="send cancel; interrupted"),
)
_ORPHANED = (
    Row(State.QUEUED, guard="resumable, server deaths left"),
    Row(State.LOST, guard="resumable"),
    Row(State.FAILED, note="interrupted"),
)
_ENDED = (
    Row(State.QUEUED, guard="transient failure, tries left", note="after 1, 2, 4 … 60 s"),
    Row(State.FAILED, note="its failure, or how its process ended"),
)

TABLE: dict[tuple[State, Event], tuple[Row, ...]] = {
    (State.QUEUED, Event.ADMIT): (Row(State.STARTING, note="attempt + 1; spawn a worker, send launch"),),
    (State.QUEUED, Event.PAUSE): (Row(State.PAUSED, guard="resumable"),),
    (State.QUEUED, Event.RESUME): (Row(State.QUEUED, note="try at once"),),
    (State.QUEUED, Event.CANCEL): (Row(State.CANCELLED),),
    (State.PAUSED, Event.PAUSE): (Row(State.PAUSED),),
    (State.PAUSED, Event.RESUME): (Row(State.QUEUED),),
    (State.PAUSED, Event.CANCEL): (Row(State.CANCELLED),),
    (State.STARTING, Event.STARTED): (Row(State.RUNNING, note="started_at"),),
    (State.STARTING, Event.PAUSE): (_stop(State.PAUSED, "resumable", "send cancel"),),
    (State.STARTING, Event.CANCEL): (_stop(State.CANCELLED, note="send cancel"),),
    (State.STARTING, Event.YIELDED): _YIELD,
    (State.STARTING, Event.EXIT): _ENDED,
    (State.STARTING, Event.DEADLINE): (
        _stop(State.QUEUED, "transient failure, tries left", "did not start; stop ladder"),
        _stop(State.FAILED, note="did not start in 10 s; stop ladder"),
    ),
    (State.STARTING, Event.ORPHANED): (
        Row(State.QUEUED, guard="nothing begun, server deaths left"),
        *_ORPHANED,
    ),
    (State.RUNNING, Event.PROGRESS): (Row(State.RUNNING, note="row and bus, at most once a second"),),
    (State.RUNNING, Event.DONE): (_stop(State.DONE, note="output recorded"),),
    (State.RUNNING, Event.PAUSE): (_stop(State.PAUSED, "resumable", "send cancel"),),
    (State.RUNNING, Event.CANCEL): (_stop(State.CANCELLED, note="send cancel"),),
    (State.RUNNING, Event.YIELDED): _YIELD,
    (State.RUNNING, Event.EXIT): _ENDED,
    (State.RUNNING, Event.DEADLINE): (
        _stop(
            State.QUEUED, "transient failure, tries left", "no word for 30 s: hung; dump stacks, stop ladder"
        ),
        _stop(State.FAILED, note="no word for 30 s: hung; dump stacks, stop ladder"),
    ),
    (State.RUNNING, Event.ORPHANED): _ORPHANED,
    (State.STOPPING, Event.STARTED): _LATE,
    (State.STOPPING, Event.PROGRESS): _LATE,
    (State.STOPPING, Event.DONE): (_stop(State.DONE, "verdict is queued or paused"), *_LATE),
    (State.STOPPING, Event.YIELDED): _LATE,
    (State.STOPPING, Event.PAUSE): (_stop(State.PAUSED, "verdict is queued"), *_LATE),
    (State.STOPPING, Event.RESUME): (_stop(State.QUEUED, "verdict is paused"), *_LATE),
    (State.STOPPING, Event.CANCEL): (_stop(State.CANCELLED, "verdict is queued or paused"), *_LATE),
    (State.STOPPING, Event.DEADLINE): (Row(State.STOPPING, note="SIGTERM, then SIGKILL to the group"),),
    (State.STOPPING, Event.EXIT): (Row(None, note="ended_at, unless it is queued or paused"),),
    (State.STOPPING, Event.ORPHANED): (Row(None),),
}


def advance(state: State, event: Event, facts: Facts) -> tuple[State, State | None]:
    """The next state, and its verdict (None but in `stopping`). Raises `IllegalTransition`."""
    for row in TABLE.get((state, event), ()):
        if row.guard and not GUARDS[row.guard](facts):
            continue
        if row.target is None:
            assert facts.verdict is not None, "a job that stops has a verdict"
            return facts.verdict, None
        return row.target, (row.verdict or facts.verdict) if row.target is State.STOPPING else None
    raise IllegalTransition(f"{event} while {state}")


def markdown() -> str:
    """The table for the architecture page."""

    def effects(row: Row) -> str:
        verdict = f"verdict = {row.verdict}" if row.verdict else ""
        return " · ".join(part for part in (verdict, row.note) if part)

    return state_table.markdown(
        (state, event, row.guard, row.target or "the verdict", effects(row))
        for (state, event), rows in TABLE.items()
        for row in rows
    )


if __name__ == "__main__":
    print(markdown())
