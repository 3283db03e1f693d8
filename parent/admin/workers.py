"""Operators' routes for workers: restart one, look whether it computes, and watch every change as events."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from parent.bus import Bus
from parent.pool import operators
from parent.pool.pool import Pool
from parent.protocols import sse
from parent.workers.client import WorkerClient, WorkerLost
from shared import asgi, wire
from shared.errors import ErrorCode, refuse

CHECK_S = 30.0


class Workers:
    """Below `/admin/workers/{id}/`: `restart`, `check` and `cache`; and `/stats` and `/admin/events`."""

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
        report = await _cache_of(host.supervisor.client)
        if isinstance(report, str):
            raise refuse(ErrorCode.LOADING, f"{entry.id} does not answer ({report}); try again")
        await asgi.respond(send, 200, msgspec.json.encode(report))

    async def stats(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The same of every model in memory; null of one that does not answer."""
        clients = {
            id_: host.supervisor.client
            for id_, host in self.pool.roster.hosts.items()
            if host.supervisor.client is not None
        }
        reports = await asyncio.gather(*map(_cache_of, clients.values()))
        found = {
            id_: None if isinstance(report, str) else report
            for id_, report in zip(clients, reports, strict=True)
        }
        await asgi.respond(send, 200, msgspec.json.encode({"models": found}))

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


async def _cache_of(client: WorkerClient) -> wire.CacheReport | str:
    """What a worker keeps, or why it does not say."""
    try:
        async with asyncio.timeout(CHECK_S):
            return await client.cache()
    except (TimeoutError, WorkerLost) as error:
        return str(error)
