"""Table R: the life of one inference request, as data. Pure.

`python -m parent.inference.states` prints it as Markdown. `granted` and `streaming` have no deadline of their
own: the watchdog turns a stuck worker into `lost`. A loss goes back to the queue: before any content as a replay,
in mid-stream with the ids so far (`resume`), after which the text goes on as if nothing had been. A second loss
in a row ends the request; new content in between makes the next loss a first one again.
"""

from enum import StrEnum
from typing import NamedTuple

from parent import state_table


class State(StrEnum):
    """Where a request is."""

    RECEIVED = "received"
    QUEUED = "queued"
    GRANTED = "granted"  # a worker has it, no content has left
    STREAMING = "streaming"  # content has left
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What can happen to a request."""

    ACCEPT = "accept"
    REFUSE = "refuse"  # by the parent or by the worker, with a failure
    GRANT = "grant"
    DEADLINE = "deadline"  # the queue or the wait bound is over
    CONTENT = "content"
    FINISH = "finish"
    FAIL = "fail"  # the worker ended it with a failure
    LOST = "lost"  # the worker is gone
    GONE = "gone"  # the client is gone


class Row(NamedTuple):
    """One line: `first_loss` True or False where the count of losses without new content decides."""

    target: State
    note: str = ""
    first_loss: bool | None = None


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

TABLE: dict[tuple[State, Event], tuple[Row, ...]] = {
    (State.RECEIVED, Event.ACCEPT): (Row(State.QUEUED, "reserve a place"),),
    (State.RECEIVED, Event.REFUSE): (Row(State.FAILED, "4xx in the protocol's own shape"),),
    (State.RECEIVED, Event.GONE): (Row(State.CANCELLED),),
    (State.QUEUED, Event.GRANT): (Row(State.GRANTED, "POST /generate"),),
    (State.QUEUED, Event.DEADLINE): (Row(State.FAILED, "429 or 503 with Retry-After"),),
    (State.QUEUED, Event.REFUSE): (Row(State.FAILED, "the worker is failed or exhausted: its reason"),),
    (State.QUEUED, Event.GONE): (Row(State.CANCELLED, "drop"),),
    (State.GRANTED, Event.CONTENT): (Row(State.STREAMING, "encode and send"),),
    (State.GRANTED, Event.FINISH): (Row(State.FINISHED, "an empty answer"),),
    (State.GRANTED, Event.FAIL): (Row(State.FAILED, "error before or in the stream"),),
    (State.GRANTED, Event.REFUSE): (Row(State.FAILED, "mapped by error code"),),
    (State.GRANTED, Event.LOST): (
        Row(State.QUEUED, "replay", True),
        Row(State.FAILED, "engine_unavailable; the request is quarantined", False),
    ),
    (State.GRANTED, Event.GONE): (Row(State.CANCELLED, "close the worker connection"),),
    (State.STREAMING, Event.CONTENT): (Row(State.STREAMING, "encode and send"),),
    (State.STREAMING, Event.FINISH): (Row(State.FINISHED, "usage; close"),),
    (State.STREAMING, Event.FAIL): (Row(State.FAILED, "terminal error frame"),),
    (State.STREAMING, Event.LOST): (
        Row(State.QUEUED, "resume with the ids so far", True),
        Row(State.FAILED, "terminal error frame, never a bare cut; the request is quarantined", False),
    ),
    (State.STREAMING, Event.GONE): (Row(State.CANCELLED, "close the worker connection"),),
}


class IllegalTransition(Exception):
    """An event that the table does not list for the present state."""


def advance(state: State, event: Event, *, first_loss: bool = True) -> State:
    """The next state. Raises `IllegalTransition`."""
    for row in TABLE.get((state, event), ()):
        if row.first_loss is None or row.first_loss is first_loss:
            return row.target
    raise IllegalTransition(f"{event} while {state}")


def markdown() -> str:
    """The table for the architecture page."""
    guards = {None: "", True: "first loss since new content", False: "second loss without new content"}
    return state_table.markdown(
        (state, event, guards[row.first_loss], row.target, row.note)
        for (state, event), rows in TABLE.items()
        for row in rows
    )


if __name__ == "__main__":
    print(markdown())
