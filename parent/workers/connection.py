"""One connection to a worker's socket: `httptools` parses, NDJSON bodies become typed events. The token path.

`Connection` carries one request at a time; `Steps` is the one of `GET /steps/NAME`, which hands every request its
events: a frame holds all that an engine step moved on, so the parent wakes up once a step and not once a token.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

from shared import ndjson, wire
from shared.errors import ErrorCode, Refused, refuse

HIGH_WATER = 256 * 1024  # bytes of events held for a reader that does not take them
MAX_ANSWER = 64 * 1024 * 1024
MAX_WAITING = 256  # events that wait for a reader before they are joined

_event_decoder = msgspec.json.Decoder(wire.Event)
_decode_event = _event_decoder.decode
_decode_whole_lines = _event_decoder.decode_lines
_frame_decoder = msgspec.json.Decoder(wire.StepFrame)
_decode_frame = _frame_decoder.decode
_decode_whole_frames = _frame_decoder.decode_lines


class Connection(asyncio.Protocol):
    """One connection: parser callbacks fill `events`, or `body` where the answer is no stream."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self.used = False
        self.streaming = False
        self.then: Callable[[Connection], None] | None = None  # when complete or lost
        self._begin()

    def _begin(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.lines = ndjson.Lines()
        self.events: list[wire.Event] = []
        self.body = b""
        self.status = 0
        self.complete = False
        self.reusable = False
        self.fault: Refused | None = None
        self._line_open = False
        self._held = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    def write_request(self, method: str, path: str, body: bytes) -> None:
        self._begin()
        assert self.transport is not None
        head = f"{method} {path} HTTP/1.1\r\nhost: worker\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"the worker's HTTP cannot be read: {error}")
        self._held += len(data)
        if self._held > HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.wake()
        self._settle()

    # ------------------------------------------------------------ httptools

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.fault is not None:  # what follows something unreadable is no answer
            return
        if self.status != 200 or not self.streaming:
            self.body += body
            if len(self.body) > MAX_ANSWER:
                self._break(f"the worker's answer is longer than {MAX_ANSWER} bytes")
            return
        try:
            if not self._line_open and body.endswith(b"\n"):  # nearly always
                self.events += _decode_whole_lines(body)
            else:
                self.events += [_decode_event(line) for line in self.lines.feed(body)]
                self._line_open = not body.endswith(b"\n")
        except (ndjson.LineTooLong, msgspec.ValidationError, msgspec.DecodeError) as error:
            self._break(f"the worker's event cannot be read: {error}")

    def on_message_complete(self) -> None:
        self.complete = True
        self.reusable = self.parser.should_keep_alive()  # true only here
        self._settle()

    # ------------------------------------------------------------ reading

    def _settle(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then(self)

    def _break(self, message: str) -> None:
        if self.fault is None:
            self.fault = refuse(ErrorCode.INTERNAL, message)
        self.abort()

    def wake(self) -> bool:
        """Wake the reader; False when nobody waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        return True

    def arrival(self) -> "asyncio.Future[None]":
        """Done when something arrives. One waiter at a time; a cancelled one is simply replaced."""
        self._waiter = waiter = self.loop.create_future()
        return waiter

    def take(self) -> list[wire.Event]:
        """All events that are here; reading goes on."""
        taken, self.events = self.events, []
        self._held = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return taken

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Steps(Connection):
    """The connection of `GET /steps/NAME`: hands each request its events."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.readers: dict[str, Connection] = {}

    def on_body(self, body: bytes) -> None:
        if self.fault is not None:
            return
        try:
            if not self._line_open and body.endswith(b"\n"):  # nearly always
                frames = _decode_whole_frames(body)
            else:
                frames = [_decode_frame(line) for line in self.lines.feed(body)]
                self._line_open = not body.endswith(b"\n")
        except (ndjson.LineTooLong, msgspec.ValidationError, msgspec.DecodeError) as error:
            self._break(f"the worker's events cannot be read: {error}")
            return
        self._held = 0  # never paused: what waits for a slow reader is joined
        for frame in frames:
            for name, events in frame.parts:
                reader = self.readers.get(name)
                if reader is None:  # it has left; its connection is being closed
                    continue
                reader.events += events
                if not reader.wake() and len(reader.events) > MAX_WAITING:
                    reader.events = joined(reader.events)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for reader in self.readers.values():
            reader.fault = reader.fault or self.fault
            reader.abort()


def joined(events: list[wire.Event]) -> list[wire.Event]:
    """The same answer in few events: neighbours of one kind become one, of prefill only the last counts."""
    few: list[wire.Event] = []
    for event in events:
        last = few[-1] if few else None
        match last, event:
            case (wire.Text() | wire.Reasoning(), wire.Text() | wire.Reasoning()) if type(last) is type(
                event
            ):
                few[-1] = type(event)(
                    last.text + event.text, last.ids + event.ids, last.logprobs + event.logprobs
                )
            case wire.Prefill(), wire.Prefill():
                few[-1] = event
            case _:
                few.append(event)
    return few
