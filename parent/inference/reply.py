"""How an answer leaves: one JSON body, or a stream, with keep-alive comments where it is server-sent events. No policy
of retries.

A stream's headers leave with its first bytes: the first event, or the first keep-alive of a request that waits
long. A failure before that is a status and a JSON body; after it, one error frame in the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable

from parent.protocols import sse
from parent.protocols.base import Answer, Meta, Protocol, retry_headers
from shared import asgi, wire
from shared.errors import Failure, Refused

NEWS_S = 1.0
Emit = Callable[[list[wire.Event], int], Awaitable[None]]
Work = Callable[[Emit], Awaitable[None]]
"""A request: it hands its events, and the number of the choice they are of, to `Emit`, and raises `Refused` where there
are no more.
"""


async def send_answer(
    send: asgi.Send, protocol: Protocol, meta: Meta, work: Work, headers: asgi.Headers = ()
) -> None:
    """The whole answer as JSON, or the failure."""
    answers = [Answer() for _ in range(meta.num_choices)]

    async def gather(events: list[wire.Event], choice: int) -> None:
        answers[choice].add(events)

    try:
        await work(gather)
    except Refused as refused:
        await send_failure(send, protocol, refused.failure, meta.request_id)
        return
    await asgi.respond(send, 200, protocol.answer(meta, answers), headers)


async def send_failure(send: asgi.Send, protocol: Protocol, failure: Failure, request_id: str = "") -> None:
    """A failure before any header has left."""
    status, body = protocol.error(failure, request_id)
    await asgi.respond(send, status, body, retry_headers(failure))


async def send_stream(
    send: asgi.Send,
    body_send: asgi.Send,
    protocol: Protocol,
    meta: Meta,
    work: Work,
    *,
    keepalive_s: float,
    status: Callable[[], str] = lambda: "",
    headers: asgi.Headers = (),
) -> None:
    """The answer as it comes: one send per batch of events.

    `body_send` takes the pieces of the body; it may be the server's own, past what only looks at headers. `status`
    says what a silent request waits for; it goes into the comments that keep the connection alive.
    """
    stream = _Stream(send, body_send, protocol, meta, keepalive_s, status, headers)
    try:
        await work(stream.emit)
        last = stream.last
    except Refused as refused:
        if not stream.started:
            stream.stop()
            await send_failure(send, protocol, refused.failure, meta.request_id)
            return
        last = stream.encoder.fail(refused.failure)
    finally:
        stream.stop()
    await stream.write(last, more=False)


class _Stream:
    """Encodes and sends; after `keepalive_s` of silence a comment, and a ping where the protocol has one.

    One timer, none per event.
    """

    def __init__(
        self,
        send: asgi.Send,
        body_send: asgi.Send,
        protocol: Protocol,
        meta: Meta,
        keepalive_s: float,
        status: Callable[[], str],
        headers: asgi.Headers,
    ) -> None:
        self.encoder = protocol.stream(meta)
        self.started = False
        self.last = b""  # the terminal frames, kept back for the last write
        self._running = meta.num_choices
        self._start, self._send = send, body_send
        self._keepalive_s = keepalive_s
        self._status = status
        self._ping = protocol.ping
        self._headers = [*sse.headers(protocol.media_type), *headers]
        self._quiet = True
        self._keeper = (
            asyncio.get_running_loop().create_task(self._keep_alive()) if protocol.has_comments else None
        )

    async def emit(self, events: list[wire.Event], choice: int) -> None:
        """One batch out."""
        finish = events[-1]
        if isinstance(finish, wire.Finish):
            frames = self.encoder.feed(events[:-1], choice) if len(events) > 1 else b""
            frames += self.encoder.finish(finish, choice)
            self._running -= 1
            if not self._running:
                self.last = frames
                return
        else:
            frames = self.encoder.feed(events, choice)
        if frames:
            if self.started:  # the token path: `write` without its detours
                self._quiet = False
                await self._send({"type": "http.response.body", "body": frames, "more_body": True})
            else:
                await self.write(frames)

    async def write(self, frames: bytes, *, more: bool = True) -> None:
        self._quiet = False
        if not self.started:
            self.started = True
            await asgi.start(self._start, 200, self._headers)
        await self._send({"type": "http.response.body", "body": frames, "more_body": more})

    def stop(self) -> None:
        """No comment any more."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep_alive(self) -> None:
        """A whole period without a write means silence. A client that does not read holds this up, rightly.

        Once the headers have left, news of the queue and of the load follow within a second.
        """
        said = ""
        while True:
            self._quiet = True
            await asyncio.sleep(self._keepalive_s)
            while self._quiet:
                said = self._status()
                await self.write((sse.comment(said) if said else sse.KEEP_ALIVE) + self._ping)
                self._quiet = True
                waited = 0.0
                while self._quiet and waited < self._keepalive_s and self._status() == said:
                    await asyncio.sleep(min(NEWS_S, self._keepalive_s))
                    waited += NEWS_S
