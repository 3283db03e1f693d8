"""The parent's end of a data channel: HTTP/1.1 over the worker's Unix socket, NDJSON bodies to typed events.

This is the token path, so it is driven by hand over `httptools` (see docs/benchmarks.md for what that buys
over an HTTP client library). One connection carries one request at a time and is kept for the next. Cancel =
close the connection. Reading has no time-out: a silent worker is the watchdog's business.

Events come on one more connection, `GET /steps/NAME`: a frame for all requests that an engine step moved on, so that
the parent wakes up once a step and not once a token. A reader that does not take its events stalls nobody: what
waits for it is joined to few events, and an answer is bounded by its context. `by_steps=False` reads the events
from the body of each answer instead, where a reader that does not take them stops its own connection.
"""

import asyncio
import uuid
from typing import TypeVar

import msgspec

from parent.workers.connection import Connection, Steps
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

CONNECT_S = 1.0
MAX_IDLE = 16  # connections kept for the next request; after a rush the others are closed
LAG_S = 5.0  # between the end of an answer and its last event on the other connection

_decode_failure = msgspec.json.Decoder(Failure).decode
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")
C = TypeVar("C", bound=Connection)

_LAST = (wire.Finish, wire.Failed)


class WorkerLost(Exception):
    """The worker ended, or was cut off, before the answer was complete.

    `reached`: it had the request, which may thus be what killed it.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class EventStream:
    """The events of one request, in batches as they arrived. Close it in every case (`async with`)."""

    def __init__(self, client: "WorkerClient", connection: Connection, name: str = "") -> None:
        self._client = client
        self._connection: Connection | None = connection
        self._name = name  # under which its events come by steps; "" = they are its body
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
            if connection.lost or (connection.complete and not self._name):
                raise WorkerLost("the worker was lost in the middle of an answer")
            if connection.complete:
                await self._late(connection.arrival())
            else:
                await connection.arrival()
        events = connection.take()
        self._ended = isinstance(events[-1], _LAST)
        return events

    async def _late(self, arrival: "asyncio.Future[None]") -> None:
        """The body has ended, the last event comes on another connection: it is there, or almost."""
        try:
            async with asyncio.timeout(LAG_S):
                await arrival
        except TimeoutError:
            raise WorkerLost("the worker ended an answer without a last event") from None

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back, or close it, which cancels the request in the worker."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._client._forget(self._name)
        if self._ended and not connection.complete and not connection.lost:
            connection.then = self._client._release  # only the end of the chunked body is still to come
        else:
            self._client._release(connection)


class WorkerClient:
    """All connections to one worker. `close` cuts every open stream: their readers see `WorkerLost`."""

    def __init__(self, socket_path: str, *, by_steps: bool = True) -> None:
        self.socket_path = socket_path
        self._by_steps = by_steps
        self._steps: Steps | None = None
        self._opening = asyncio.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self.mounted: dict[str, wire.MountedAdapter] = {}  # adapters by key, as far as is known here
        self.mounting: dict[str, asyncio.Task[None]] = {}

    async def generate(self, request: wire.GenerateRequest) -> EventStream:
        """Admission is certain when this returns. Raises `Refused` with the worker's failure, `WorkerLost`."""
        name, steps = "", None
        if self._by_steps:
            steps = await self._open_steps()
            name = request.request_id
            request = msgspec.structs.replace(request, reader=steps.name)
        try:
            connection = await self._ask(
                "POST", "/generate", _encode(request), streaming=True, steps=steps, name=name
            )
        except BaseException:
            self._forget(name)
            raise
        if connection.status == 200:
            return EventStream(self, connection, name)
        self._forget(name)
        failure = await self._failure(connection)
        if failure.code is ErrorCode.SHUTTING_DOWN or failure.param == "reader":
            # It is being replaced, or it has lost our reader: another try will serve this.
            raise WorkerLost(failure.message, reached=False)
        raise Refused(failure)

    async def render(
        self, prompt: wire.Prompt, *, add_special: bool = True, add_generation_prompt: bool = True
    ) -> wire.RenderResult:
        """The prompt as the model would see it, see `wire.RenderRequest`. Raises `Refused`, `WorkerLost`."""
        request = wire.RenderRequest(
            prompt=prompt, add_special=add_special, add_generation_prompt=add_generation_prompt
        )
        return await self._call("POST", "/render", _encode(request), wire.RenderResult)

    async def detokenize(self, ids: list[int]) -> wire.DetokenizeResult:
        """The text of these ids. Raises `Refused`, `WorkerLost`."""
        body = _encode(wire.DetokenizeRequest(ids=ids))
        return await self._call("POST", "/detokenize", body, wire.DetokenizeResult)

    async def embed(self, request: wire.EmbedRequest) -> wire.EmbedResult:
        """The vectors of texts. Raises `Refused`, `WorkerLost`."""
        return await self._call("POST", "/embed", _encode(request), wire.EmbedResult)

    async def rank(self, request: wire.RankRequest) -> wire.RankResult:
        """The scores of documents. Raises `Refused`, `WorkerLost`."""
        return await self._call("POST", "/rank", _encode(request), wire.RankResult)

    async def mount(self, key: str, path: str) -> wire.Mounts:
        """Have it hold an adapter. Raises `Refused` with what is wrong with it, `WorkerLost`."""
        return await self._call(
            "POST", "/adapters", _encode(wire.MountRequest(key=key, path=path)), wire.Mounts
        )

    async def unmount(self, key: str) -> wire.Mounts:
        """Have it let an adapter go. Raises `Refused`, `WorkerLost`."""
        return await self._call("DELETE", "/adapters", _encode(wire.UnmountRequest(key=key)), wire.Mounts)

    async def adapters(self) -> wire.Mounts:
        """What it holds. Raises `Refused`, `WorkerLost`."""
        return await self._call("GET", "/adapters", b"", wire.Mounts)

    async def stats(self) -> wire.WorkerStats:
        """The worker's counters now. Raises `Refused`, `WorkerLost`."""
        return await self._call("GET", "/stats", b"", wire.WorkerStats)

    async def cache(self) -> wire.CacheReport:
        """What it keeps of prompts, and why the last ones were found or not. Raises as `generate`."""
        return await self._call("GET", "/cache", b"", wire.CacheReport)

    def close(self) -> None:
        """Cut everything; later calls raise `WorkerLost`."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        if self._steps is not None:
            self._steps.abort()

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

    async def _open_steps(self) -> Steps:
        """The connection of `GET /steps/NAME`, opened before the first request. Raises `WorkerLost`."""
        async with self._opening:
            steps = self._steps
            if steps is not None and not steps.lost and not steps.complete:
                return steps
            steps = await self._reach(Steps)
            steps.streaming = True
            steps.name = uuid.uuid4().hex  # a new one: the worker may not have noticed the end of the last
            steps.write_request("GET", f"/steps/{steps.name}", b"")
            while not steps.status and not steps.lost:
                await steps.arrival()
            if steps.status != 200:
                steps.abort()
                raise WorkerLost("the worker was lost before it answered", reached=False)
            self._steps = steps
            return steps

    def _forget(self, name: str) -> None:
        if name and self._steps is not None:
            self._steps.readers.pop(name, None)

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        streaming: bool,
        steps: Steps | None = None,
        name: str = "",
    ) -> Connection:
        """Send a request and wait for the head of its answer. `steps`: where the events of `name` come."""
        while True:
            connection = await self._connect()
            reused, connection.used, connection.streaming = connection.used, True, streaming
            connection.write_request(method, path, body)
            if steps is not None:
                steps.readers[name] = connection
                if steps.lost:  # meanwhile; nobody would tell this connection
                    self._release(connection)
                    raise WorkerLost("the worker's events were cut off", reached=False)
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

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                self._busy.add(connection)
                return connection
        connection = await self._reach(Connection)
        self._busy.add(connection)
        return connection

    async def _reach(self, kind: type[C]) -> C:
        """A new connection. Raises `WorkerLost`."""
        if self._closed:
            raise WorkerLost("the worker is stopping", reached=False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                return (await loop.create_unix_connection(kind, self.socket_path))[1]
        except (OSError, TimeoutError) as error:
            raise WorkerLost(f"no connection to the worker: {error or 'timed out'}", reached=False) from error

    def _release(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection.lost:
            return
        if connection.reusable and not self._closed and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _whole(self, connection: Connection) -> None:
        while not connection.complete:
            if connection.fault is not None:
                raise connection.fault
            if connection.lost:
                raise WorkerLost("the worker was lost in the middle of an answer")
            connection.take()
            await connection.arrival()

    async def _failure(self, connection: Connection, *, release: bool = True) -> Failure:
        try:
            await self._whole(connection)
            return _decode_failure(connection.body)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return Failure(ErrorCode.INTERNAL, f"the worker answered with status {connection.status}")
        finally:
            if release:
                self._release(connection)
