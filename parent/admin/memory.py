"""Operators' routes for memory: the ledger, and the arithmetic of a model that may or may not fit."""

from functools import partial
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from parent.library.fit import bill, most_context
from parent.pool.plan import hopeless
from parent.pool.pool import Pool
from shared import asgi
from shared.errors import ErrorCode, refuse


class Memory:
    """`GET /admin/ledger` and `GET /admin/fit?model=NAME&context=TOKENS`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def ledger(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        view = self.pool.desk.ledger.view()
        await asgi.respond(send, 200, msgspec.json.encode(view))

    async def fit(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Alone on this machine, and beside what is in memory now."""
        asked = {
            name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
        }
        entry = (await self.pool.roster.choose(asked.get("model", ""))).entry
        host = self.pool.roster.host(entry)
        launch = host.recipe.launch
        context = _tokens(asked.get("context", "")) or launch.max_context or entry.context
        if not context:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"{entry.id} does not say its context; give one", param="context"
            )
        ledger, limit = self.pool.desk.ledger, self.pool.settings.max_resident
        count = partial(
            bill,
            entry,
            device=replace(self.pool.device, budget_bytes=ledger.usable),
            how=launch,
        )
        fit = count(context)
        needs, never = host.slot.bill, hopeless(self.pool.desk, host.slot)
        has_place = not limit or ledger.count("model") < limit
        report: dict[str, Any] = {
            "model": entry.id,
            "context_tokens": context,
            "fits": fit.fits,
            "weights_bytes": fit.weights_bytes,
            "kv_bytes": fit.kv_bytes,
            "prefix_bytes": fit.prefix_bytes,
            "transient_bytes": fit.transient_bytes,
            "total_bytes": fit.needed_bytes,
            "usable_bytes": fit.usable_bytes,
            "max_safe_context": most_context(count, entry.context),
            "loads_with_bytes": needs.least,
            "would_like_bytes": needs.wish,
            "free_bytes": ledger.free,
            "fits_beside": never is None and has_place and needs.least <= ledger.free,
            "never": never.message if never else None,
        }
        await asgi.respond(send, 200, msgspec.json.encode(report))


def _tokens(text: str) -> int:
    if text and not (text.isdecimal() and int(text) > 0):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"context: {text[:40]!r} is not a number of tokens above 0",
            param="context",
        )
    return int(text or 0)
