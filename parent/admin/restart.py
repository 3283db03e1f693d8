"""`POST /admin/restart`: become the program on disk without losing a request or a worker. `GET` says how it went."""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from parent.bodies import read_json
from shared import asgi

MAX_BODY = 1024


class RestartBody(msgspec.Struct, frozen=True):
    """`now`: answers that still run end with an error frame instead of being waited for."""

    now: bool = False


class RestartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`boot` is another after every start. `reason` says why a restart was given up, or what it could not change."""

    boot: str
    pid: int
    state: Literal["serving", "draining", "given_up"] = "serving"
    reason: str = ""


class Restart:
    """The two handlers. `request` starts a restart and raises `Refused` where it cannot; `boot` names this start."""

    def __init__(
        self,
        boot: str,
        request: Callable[[bool], Awaitable[RestartStatus]],
        status: Callable[[], RestartStatus],
        request_wait_s: Callable[[], float],
    ) -> None:
        self.boot = boot
        self._request = request
        self._status = status
        self._request_wait_s = request_wait_s

    async def restart(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """202: accepted. No new connection is answered from now on, until the new image does or it is given up."""
        asked = await read_json(
            receive, RestartBody, MAX_BODY, silence_s=self._request_wait_s(), shape='{"now": true} or empty'
        )
        await asgi.respond(send, 202, msgspec.json.encode(await self._request(asked.now)))

    async def status(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await asgi.respond(send, 200, msgspec.json.encode(self._status()), [(b"cache-control", b"no-store")])
