"""Operators' routes for requests that were in flight at two worker deaths: list them, let one run again."""

import time

import msgspec

from parent.inference.quarantine import Quarantine as Held
from shared import asgi
from shared.errors import ErrorCode, refuse


class Quarantine:
    """`GET /admin/quarantine` and `DELETE /admin/quarantine/{hash}`."""

    def __init__(self, held: Held) -> None:
        self.held = held

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        now = time.monotonic()
        rows = [
            {
                "hash": key.hex(),
                "model": case.model,
                "deaths": len(case.workers),
                "last_death_s": round(now - case.at, 1),
            }
            for key, case in self.held.held()
        ]
        await asgi.respond(send, 200, msgspec.json.encode({"requests": rows}))

    async def release(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        text = scope["path_params"]["hash"]
        try:
            found = self.held.release(bytes.fromhex(text))
        except ValueError:
            found = False
        if not found:
            raise refuse(ErrorCode.NOT_FOUND, f"no request with the hash {text[:64]!r} is held")
        await asgi.respond(send, 200, msgspec.json.encode({"released": text}))
