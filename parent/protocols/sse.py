"""Server-sent events: frames and comments as bytes. Pure."""

from typing import Any

import msgspec

from shared import wire

encode = msgspec.json.Encoder().encode
"""A value as JSON; of a string, the JSON string."""

HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def headers(media_type: bytes) -> list[tuple[bytes, bytes]]:
    """Those of a stream of another type."""
    return [(b"content-type", media_type), *HEADERS[1:]]


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def data(payload: Any) -> bytes:
    """One frame without a name. JSON holds no raw newline, so one `data:` line is enough."""
    return b"data: %b\n\n" % encode(payload)


MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def around(frame: bytes) -> tuple[bytes, bytes]:
    """What stands before and after the JSON string `MARK` (its last one) in a frame.

    All content chunks of a stream differ only in their text, so the rest is encoded once.
    """
    before, after = pieces(frame, 1)
    return before, after


def pieces(frame: bytes, count: int) -> list[bytes]:
    """The same where the text stands `count` times: what to join with it."""
    return frame.rsplit(encode(MARK), count)


def named(event: str, payload: Any, event_id: int | None = None) -> bytes:
    """One frame with a name, and an id for `Last-Event-ID` where given."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    return b"%bevent: %b\ndata: %b\n\n" % (head.encode(), event.encode(), encode(payload))


def comment(text: str) -> bytes:
    """What clients skip but connections notice. One line, whatever the text."""
    return f": {' '.join(text.split())}\n\n".encode()


def prefill_comments(events: list[wire.Event]) -> list[bytes]:
    """Progress of the prompt, for a person who looks at the wire; clients skip it."""
    return [
        comment(f"prefill {event.done}/{event.total}") for event in events if isinstance(event, wire.Prefill)
    ]
