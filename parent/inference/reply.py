"""How an answer leaves: one JSON body, or server-sent events with keep-alive comments. No policy of retries.

A stream's headers leave with its first bytes: the first event, or the first keep-alive of a request that waits
long. A failure before that is a status and a JSON body; after it, one error frame in the stream.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from parent.protocols import sse
from parent.protocols.base import Answer, Meta, Protocol, retry_headers
from shared import asgi, wire
from shared.errors import Failure, Refused

Events = AsyncGenerator[list[wire.Event], None]


async def send_answer(send: asgi.Send, protocol: Protocol, meta: Meta, events: Events) -> None:
    """The whole answer as JSON, or the failure."""
    whole = Answer()
    try:
        async with aclosing(events):
            async for batch in events:
                whole.add(batch)
    except Refused as refused:
        await send_failure(send, protocol, refused.failure)
        return
    await asgi.respond(send, 200, protocol.answer(meta, whole))


async def send_failure(send: asgi.Send, protocol: Protocol, failure: Failure) -> None:
    """A failure before any header has left."""
    status, body = protocol.error(failure)
    await asgi.respond(send, status, body, retry_headers(failure))


async def send_stream(
    send: asgi.Send, protocol: Protocol, meta: Meta, events: Events, keepalive_s: float
) -> None:
    """The answer as it comes: one send per batch of events."""
    out = _Stream(send, keepalive_s)
    encoder = protocol.stream(meta)
    last = b""
    try:
        async with aclosing(events):
            async for batch in events:
                finish = batch[-1]
                if isinstance(finish, wire.Finish):
                    last = encoder.feed(batch[:-1]) if len(batch) > 1 else b""
                    last += encoder.finish(finish)
                elif frames := encoder.feed(batch):
                    await out.write(frames)
    except Refused as refused:
        if not out.started:
            out.stop()
            await send_failure(send, protocol, refused.failure)
            return
        last = encoder.fail(refused.failure)
    finally:
        out.stop()
    await out.write(last, more=False)


class _Stream:
    """Sends bytes; after `keepalive_s` of silence a comment. One timer, none per event."""

    def __init__(self, send: asgi.Send, keepalive_s: float) -> None:
        self.started = False
        self._send = send
        self._keepalive_s = keepalive_s
        self._wrote_at = time.monotonic()
        self._writing = False
        self._keeper: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._keep_alive())

    async def write(self, frames: bytes, *, more: bool = True) -> None:
        self._wrote_at = time.monotonic()
        self._writing = True
        if not self.started:
            self.started = True
            await asgi.start(self._send, 200, sse.HEADERS)
        await self._send({"type": "http.response.body", "body": frames, "more_body": more})
        self._writing = False

    def stop(self) -> None:
        """No comment any more."""
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None

    async def _keep_alive(self) -> None:
        while True:
            silent_s = time.monotonic() - self._wrote_at
            if silent_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent_s)
            elif self._writing:  # the client does not read: nothing to keep alive
                await asyncio.sleep(self._keepalive_s)
            else:
                await self.write(sse.KEEP_ALIVE)
