"""The restart in place, step by step: check that a new image starts, stop accepting, let answers end, exec.

Connections that come meanwhile wait in the kernel for whoever accepts next: the new image, or, where the answers do
not end in time, this one again.
"""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from parent.admin.restart import RestartStatus
from shared import asgi
from shared.errors import ErrorCode, refuse
from shared.logs import event

log = logging.getLogger(__name__)
_ENDLESS = re.compile(r"/admin/events|/api/jobs/[^/]+/stream")
"""Streams that end for a restart; whoever reads them connects again."""

LAST_FRAMES_S = 5.0  # for the error frames of answers that were cut
_POLL_S = 0.02


class Listening(Protocol):
    """What the steps of a restart do to the server."""

    async def pause(self) -> None:
        """Accept nothing, and read no further request."""

    async def resume(self) -> None:
        """Accept again."""

    def num_open(self) -> int:
        """Connections on which something is under way."""

    def parked(self) -> list[int]:
        """The sockets of all others, for the new image."""

    def cut(self) -> None:
        """End the answers that run with an error; the workers stay."""

    async def suspend(self) -> None:
        """Close files, which the new image opens; the workers stay, those of jobs too."""

    def leave(self) -> None:
        """Shut down."""


class Endings:
    """An ASGI app around another: `end` ends the streams that would never end by themselves."""

    def __init__(self, app: asgi.App) -> None:
        self.app = app
        self._ending = asyncio.Event()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if not _ENDLESS.fullmatch(scope.get("path") or ""):
            await self.app(scope, receive, send)
            return
        begun = complete = False

        async def watched(message: asgi.Message) -> None:
            nonlocal begun, complete
            begun = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        answer = asyncio.ensure_future(self.app(scope, receive, watched))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({answer, ending}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, ending):
                task.cancel()
            await asyncio.gather(answer, ending, return_exceptions=True)
        if begun and not complete:
            await asgi.send_chunk(send, b"", more=False)

    def end(self) -> None:
        """Now; streams that begin later are not touched."""
        self._ending.set()
        self._ending = asyncio.Event()


class Restarter:
    """One per server. `execute` becomes the new image, with these sockets of clients, or raises OSError;
    `preflight` says why it would fail; `settle` writes down what the new image takes over, or says why it cannot.
    `drain_s` is asked at each restart.
    """

    def __init__(
        self,
        boot: str,
        *,
        drain_s: Callable[[], float],
        execute: Callable[[Sequence[int]], None],
        preflight: Callable[[], Awaitable[str]],
        settle: Callable[[], str] = str,
    ) -> None:
        self._server: Listening | None = None
        self._is_closing = False
        self.boot = boot
        self._drain_s = drain_s
        self._execute, self._preflight, self._settle = execute, preflight, settle
        self._status = RestartStatus(boot=boot, pid=os.getpid())
        self._task: asyncio.Task[None] | None = None

    def serves(self, server: Listening, reason: str = "") -> None:
        """What listens, once it is there. `reason`: what the restart that led here could not change."""
        self._server = server
        self._tell("serving", reason)

    def status(self) -> RestartStatus:
        return self._status

    def close(self) -> None:
        """The server shuts down: a restart that waits is forgotten."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()

    async def request(self, now: bool) -> RestartStatus:
        """Begin. Raises `Refused`: shutting_down, or conflict where one runs or the new image would not start."""
        if self._is_closing or self._server is None:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if self._status.state == "draining":
            raise refuse(ErrorCode.CONFLICT, "a restart is under way already")
        if reason := self._settle():
            raise refuse(ErrorCode.CONFLICT, f"not restarted: {reason}")
        self._tell("draining")
        try:
            reason = await self._preflight()
        except BaseException:
            self._tell("serving")
            raise
        if reason:
            self._tell("serving")
            raise refuse(ErrorCode.CONFLICT, f"not restarted, the new server would not start: {reason}")
        event(log, "server.restart", now=now)
        self._task = asyncio.create_task(self._restart(self._server, now))
        return self._status

    async def _restart(self, server: Listening, now: bool) -> None:
        try:
            await server.pause()
            if now:
                server.cut()
            drain_s = self._drain_s()
            left = await self._answered(server, LAST_FRAMES_S if now else drain_s)
            if left and not now:
                answers = "answer still runs" if left == 1 else "answers still run"
                await self._give_up(
                    server,
                    f"{left} {answers} after {drain_s:g} s; nothing was lost; `mlxd restart --now` cuts them",
                )
                return
            if reason := self._settle():  # a model may have been loaded meanwhile
                await self._give_up(server, reason)
                return
        except Exception as error:
            log.exception("server.restart_failed")
            await self._give_up(server, f"a fault of mlxd: {type(error).__name__}: {error}")
            return
        event(log, "server.exec", cut=left)
        try:
            await server.suspend()
        except Exception:  # half closed we cannot go on; the new image begins afresh
            log.exception("server.not_suspended")
        try:
            self._execute(server.parked())
        except OSError as error:  # everything is closed, so the only way on is a start from without
            event(log, "server.not_restarted", level=logging.ERROR, reason=str(error))
            server.leave()

    async def _answered(self, server: Listening, within_s: float) -> int:
        """Wait until every answer has left; how many have not in the end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while (left := server.num_open()) and loop.time() < until:  # noqa: ASYNC110  (uvicorn tells nobody)
            await asyncio.sleep(_POLL_S)
        return left

    async def _give_up(self, server: Listening, reason: str) -> None:
        event(log, "server.not_restarted", level=logging.WARNING, reason=reason)
        self._tell("given_up", reason)
        await server.resume()

    def _tell(self, state: str, reason: str = "") -> None:
        self._status = RestartStatus(boot=self.boot, pid=os.getpid(), state=state, reason=reason)  # type: ignore[arg-type]
