"""`/v1/models` and `/v1/models/{id}`: what is served, under each of its names, ids with slashes included."""

from typing import Any

import msgspec

from parent.library.catalog import ModelEntry
from parent.pool.models import not_found
from parent.pool.pool import Pool
from shared import asgi, wire


class Models:
    """The two routes. `created` is the start of the server: a folder has no date of its own to offer."""

    def __init__(self, pool: Pool, created: int) -> None:
        self.pool = pool
        self.created = created

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        rows = [self._row(model) for model in self.pool.models]
        await asgi.respond(send, 200, msgspec.json.encode({"object": "list", "data": rows}))

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        name = scope["path_params"]["id"]
        for model in self.pool.models:
            if name == model.id or name in model.aliases:
                await asgi.respond(send, 200, msgspec.json.encode(self._row(model)))
                return
        raise not_found(self.pool.models, name)

    def _row(self, model: ModelEntry) -> dict[str, Any]:
        supervisor = self.pool.supervisor(model.id)
        facts = supervisor.facts
        defaults = facts.defaults if facts else wire.Sampling()
        return {
            "id": model.id,
            "object": "model",
            "created": self.created,
            "owned_by": "mlxd",
            "aliases": model.aliases,
            "state": supervisor.state,
            "context_length": facts.context if facts else model.context,
            "size_bytes": model.bytes,
            "family": facts.family if facts else model.family,
            "capabilities": {
                "chat": facts.has_chat_template if facts else None,
                "completions": True,
                "reasoning": facts.reasoning if facts else None,
                "tools": False,
                "vision": False,
                "audio": False,
                "structured_output": False,
                "embeddings": False,
            },
            "gen_defaults": {
                "temperature": defaults.temperature,
                "top_p": defaults.top_p,
                "top_k": defaults.top_k,
                "min_p": defaults.min_p,
            },
        }
