"""Routes to look at jobs of every kind."""

from urllib.parse import parse_qs

import msgspec

from parent.jobs.queue import JobQueue
from parent.jobs.view import view
from shared import asgi
from shared.errors import ErrorCode, refuse

MOST = 1000
USUAL = 50


class JobRoutes:
    """`GET /api/jobs` and `GET /api/jobs/{id}`."""

    def __init__(self, queue: JobQueue) -> None:
        self.queue = queue

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Newest first, `?limit=` of them (50), of one `?kind=`."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        limit = query.get("limit", [str(USUAL)])[-1]
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"limit must be 1 to {MOST}, not {limit!r}", param="limit"
            )
        jobs = await self.queue.list(limit=int(limit), kind=query.get("kind", [""])[-1])
        await asgi.respond(send, 200, msgspec.json.encode({"ok": True, "jobs": [view(job) for job in jobs]}))

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        job = await self.queue.get(scope["path_params"]["id"])
        await asgi.respond(send, 200, msgspec.json.encode({"ok": True, "job": view(job)}))
