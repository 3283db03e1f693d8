"""Small ASGI helpers that both the parent's and the worker's apps need. No framework, no policy."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from shared.errors import ErrorCode, refuse

Headers = Sequence[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def read_body(
    receive: Receive, limit: int, *, declared: int | None = None, silence_s: float | None = None
) -> bytes:
    """The whole request body. Raises `Refused` (too_large) past `limit` bytes, `ClientGone` on a cut.

    With `silence_s` also `Refused` (request_timeout) where nothing more of it comes for so long.
    """
    if declared is not None and declared > limit:
        raise refuse(ErrorCode.TOO_LARGE, f"the request body has {declared} bytes; the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await receive()
        except TimeoutError:
            raise refuse(
                ErrorCode.REQUEST_TIMEOUT, f"the rest of the request body did not come within {silence_s:g} s"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise refuse(ErrorCode.TOO_LARGE, f"the request body is over the limit of {limit} bytes")
        parts.append(chunk)
        if not message.get("more_body", False):
            return b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left. Call it only once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_gone(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work` beside a disconnect watcher; when the client leaves, `work` is cancelled and awaited.

    Returns True when the work ended by itself, False when the client left first. Errors of `work` are raised.
    """
    task: asyncio.Future[None] = asyncio.ensure_future(work())
    watcher = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
        if finished:
            task.result()
        return finished
    finally:
        for waiting in (task, watcher):
            waiting.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """One whole response; `content-type` defaults to JSON."""
    given = list(headers)
    if not any(name == b"content-type" for name, _ in given):
        given = [(b"content-type", b"application/json"), *given]
    await start(send, status, [*given, (b"content-length", str(len(body)).encode())])
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, headers: Headers) -> None:
    """Send the response head."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_chunk(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a piece of a streamed body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
