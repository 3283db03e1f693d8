"""The parent's end of a data channel: HTTP/1.1 over the worker's Unix socket, NDJSON bodies to typed events.

This is the token path, so it is driven by hand over `httptools` (see docs/benchmarks.md for what that buys
over an HTTP client library). One connection carries one request at a time and is kept for the next. Cancel =
close the connection. Reading has no time-out: a silent worker is the watchdog's business. Back-pressure is per
request: a reader that does not take its events stops the reading of its own connection, nobody else's.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

import httptools
import msgspec

from shared import ndjson, wire
from shared.errors import ErrorCode, Failure, Refused, refuse

CONNECT_S = 1.0
HIGH_WATER = 256 * 1024  # bytes of events held for a reader that does not take them
MAX_ANSWER = 64 * 1024 * 1024

_event_decoder = msgspec.json.Decoder(wire.Event)
_decode_event = _event_decoder.decode
_decode_whole_lines = _event_decoder.decode_lines
_decode_failure = msgspec.json.Decoder(Failure).decode
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


_LAST = (wire.Finish, wire.Failed)


class WorkerLost(Exception):
    """The worker ended, or was cut off, before the answer was complete.

    `reached`: it had the request, which may thus be what killed it.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class _Connection(asyncio.Protocol):
    """One connection: parser callbacks fill `events`, or `body` where the answer is no stream."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self.used = False
        self.streaming = False
        self.then: Callable[[_Connection], None] | None = None  # when complete or lost
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
        waiter, self._waiter = self._waiter, None  # `_wake`, without the call: this is the token path
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._wake()
        self._settle()

    # ------------------------------------------------------------ httptools

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
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

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

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


class EventStream:
    """The events of one request, in batches as they arrived. Close it in every case (`async with`)."""

    def __init__(self, client: "WorkerClient", connection: _Connection) -> None:
        self._client = client
        self._connection: _Connection | None = connection
        self._ended = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> list[wire.Event]:
        """The next batch, never empty; ends after `Finish` or `Failed`. Raises `WorkerLost`, `Refused`."""
        connection = self._connection
        if self._ended or connection is None:
            raise StopAsyncIteration
        while not connection.events:
            if connection.fault is not None:
                raise connection.fault
            if connection.complete or connection.lost:
                raise WorkerLost("the worker was lost in the middle of an answer")
            connection._waiter = arrival = connection.loop.create_future()
            await arrival
        if connection._paused:
            events = connection.take()
        else:  # `take`, without the call
            events, connection.events, connection._held = connection.events, [], 0
        self._ended = isinstance(events[-1], _LAST)
        return events

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back, or close it, which cancels the request in the worker."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._ended and not connection.complete and not connection.lost:
            connection.then = self._client._release  # only the end of the chunked body is still to come
        else:
            self._client._release(connection)


class WorkerClient:
    """All connections to one worker. `close` cuts every open stream: their readers see `WorkerLost`."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    async def generate(self, request: wire.GenerateRequest) -> EventStream:
        """Admission is certain when this returns. Raises `Refused` with the worker's failure, `WorkerLost`."""
        connection = await self._ask("POST", "/generate", _encode(request), streaming=True)
        if connection.status == 200:
            return EventStream(self, connection)
        failure = await self._failure(connection)
        if failure.code is ErrorCode.SHUTTING_DOWN:  # it is being replaced: another worker will serve this
            raise WorkerLost(failure.message, reached=False)
        raise Refused(failure)

    async def render(self, prompt: wire.Prompt) -> wire.RenderResult:
        """The prompt as the model would see it. Raises `Refused`, `WorkerLost`."""
        return await self._call(
            "POST", "/render", _encode(wire.RenderRequest(prompt=prompt)), wire.RenderResult
        )

    async def stats(self) -> wire.WorkerStats:
        """The worker's counters now. Raises `Refused`, `WorkerLost`."""
        return await self._call("GET", "/stats", b"", wire.WorkerStats)

    def close(self) -> None:
        """Cut everything; later calls raise `WorkerLost`."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    # ------------------------------------------------------------ connections

    async def _call(self, method: str, path: str, body: bytes, answer: type[T]) -> T:
        connection = await self._ask(method, path, body, streaming=False)
        try:
            if connection.status != 200:
                raise Refused(await self._failure(connection, release=False))
            await self._whole(connection)
            return msgspec.json.decode(connection.body, type=answer)
        finally:
            self._release(connection)

    async def _ask(self, method: str, path: str, body: bytes, *, streaming: bool) -> _Connection:
        """Send a request and wait for the head of its answer."""
        while True:
            connection = await self._connect()
            reused, connection.used, connection.streaming = connection.used, True, streaming
            connection.write_request(method, path, body)
            try:
                while not connection.status and not connection.lost and connection.fault is None:
                    await connection.arrival()
            except BaseException:
                self._release(connection)
                raise
            if connection.status:
                return connection
            self._release(connection)
            if connection.fault is not None:
                raise connection.fault
            if not reused or self._closed:
                raise WorkerLost("the worker was lost before it answered")
            # a kept connection may have been closed by the worker just then: ask on a new one

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                self._busy.add(connection)
                return connection
        if self._closed:
            raise WorkerLost("the worker is stopping", reached=False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_unix_connection(_Connection, self.socket_path)
        except (OSError, TimeoutError) as error:
            raise WorkerLost(f"no connection to the worker: {error or 'timed out'}", reached=False) from error
        self._busy.add(connection)
        return connection

    def _release(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection.lost:
            return
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _whole(self, connection: _Connection) -> None:
        while not connection.complete:
            if connection.fault is not None:
                raise connection.fault
            if connection.lost:
                raise WorkerLost("the worker was lost in the middle of an answer")
            connection.take()
            await connection.arrival()

    async def _failure(self, connection: _Connection, *, release: bool = True) -> Failure:
        try:
            await self._whole(connection)
            return _decode_failure(connection.body)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return Failure(ErrorCode.INTERNAL, f"the worker answered with status {connection.status}")
        finally:
            if release:
                self._release(connection)
