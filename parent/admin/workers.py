"""Operators' routes: restart a worker, and watch every change of state as server-sent events."""

from collections.abc import Callable
from typing import Any

import msgspec

from parent.bus import Bus
from parent.pool.pool import Pool
from parent.protocols import sse
from shared import asgi


class Workers:
    """`POST /admin/workers/{id}/restart` and `GET /admin/events`."""

    def __init__(self, pool: Pool, bus: Bus, view: Callable[[], dict[str, Any]]) -> None:
        self.pool = pool
        self.bus = bus
        self.view = view

    async def restart(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        model = self.pool.resolve(scope["path_params"]["id"])
        self.pool.restart(model.id)
        await asgi.respond(
            send, 202, msgspec.json.encode({"model": model.id, "state": self.pool.supervisor(model.id).state})
        )

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
