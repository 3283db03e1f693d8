"""Operators' routes for workers: restart one, look whether it computes, and watch every change as events."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from parent.bus import Bus
from parent.pool import operators
from parent.pool.pool import Pool
from parent.protocols import sse
from parent.workers.client import WorkerLost
from shared import asgi
from shared.errors import ErrorCode, refuse

CHECK_S = 30.0


class Workers:
    """`POST /admin/workers/{id}/restart` and `…/check`, `GET /admin/workers/{id}/cache` and `GET /admin/events`."""

    def __init__(self, pool: Pool, bus: Bus, view: Callable[[], dict[str, Any]]) -> None:
        self.pool = pool
        self.bus = bus
        self.view = view

    async def restart(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        entry = self.pool.roster.library.resolve(scope["path_params"]["id"]).entry
        host = operators.restart(self.pool, entry)
        answer = {"model": entry.id, "state": host.supervisor.state}
        await asgi.respond(send, 202, msgspec.json.encode(answer))

    async def check(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Deep health: one small forward where the worker is idle, else whether its steps go on. 200 or 503."""
        entry = self.pool.roster.library.resolve(scope["path_params"]["id"]).entry
        host = self.pool.roster.hosts.get(entry.id)
        if host is None or host.supervisor.client is None:
            raise refuse(ErrorCode.CONFLICT, f"{entry.id} is not loaded, so there is nothing to check")
        found = await host.supervisor.check(CHECK_S)
        await asgi.respond(send, 200 if found.ok else 503, msgspec.json.encode(found))

    async def cache(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What the model's worker keeps of prompts, and why the last ones were found or not."""
        entry = self.pool.roster.library.resolve(scope["path_params"]["id"]).entry
        host = self.pool.roster.hosts.get(entry.id)
        if host is None or host.supervisor.client is None:
            raise refuse(ErrorCode.CONFLICT, f"{entry.id} is not loaded, so it keeps nothing in memory")
        try:
            async with asyncio.timeout(CHECK_S):
                report = await host.supervisor.client.cache()
        except (TimeoutError, WorkerLost) as error:
            raise refuse(ErrorCode.LOADING, f"{entry.id} does not answer ({error}); try again") from None
        await asgi.respond(send, 200, msgspec.json.encode(report))

    async def events(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """A `snapshot` first (so a lost `Last-Event-ID` loses nothing), then a `state` for every change."""

        async def work() -> None:
            await asgi.start(send, 200, sse.HEADERS)
            after = self.bus.last_id
            await asgi.send_chunk(send, sse.named("snapshot", self.view(), after))
            async for event in self.bus.subscribe(after):
                await asgi.send_chunk(send, sse.named(event.kind, event.data, event.id))
            await asgi.send_chunk(send, b"", more=False)

        await asgi.run_until_gone(receive, work)
