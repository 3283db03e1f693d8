"""Operators' routes for the configuration: what is in force and why, and changes of it while serving."""

import asyncio
from typing import Any

import msgspec

from parent.config import Settings, fields
from parent.live_config import LiveConfig
from parent.model_options import ModelOptions
from parent.values import fields_of
from shared import asgi
from shared.errors import ErrorCode, refuse

MOST_BYTES = 1 << 20
SILENCE_S = 30.0


class Config:
    """`GET /admin/config` and `PATCH /admin/config`."""

    def __init__(self, live: LiveConfig) -> None:
        self.live = live
        self._patching = asyncio.Lock()

    async def show(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The JSON Schemas, every value with its origin, what waits for a restart, and the models' options."""
        live = self.live
        view = {
            "file": live.file,
            "schema": schema_of(Settings),
            "model_schema": schema_of(ModelOptions),
            "values": live.settings,
            "origins": live.origins,
            "pending": live.pending,
            "models": live.models,
        }
        await asgi.respond(send, 200, msgspec.json.encode(view, enc_hook=str))

    async def patch(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`{"NAME": VALUE, "models": {ID: {…}}}`; null removes. 400 with `param` on a bad one, and no change."""
        body = await asgi.read_body(receive, MOST_BYTES, silence_s=SILENCE_S)
        try:
            values = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = f"the body is no JSON object of settings ({error})"
            raise refuse(ErrorCode.INVALID_REQUEST, problem) from None
        _refuse_programs(values)
        async with self._patching:
            await asyncio.to_thread(self.live.write, values)  # it waits for the disk
            self.live.reload()
            results = self.live.results(values)
        await asgi.respond(send, 200, msgspec.json.encode({"results": results}))


def _refuse_programs(values: dict[str, Any]) -> None:
    """Which program runs is for who can write the file, not for who can send a request."""
    models = values.get("models")
    tables = dict(models) if isinstance(models, dict) else {}
    tables |= {name.removeprefix("models."): table for name, table in values.items() if name != "models"}
    for model_id, table in tables.items():
        if isinstance(table, dict) and "python" in table:
            name = f"models.{model_id}.python"
            raise refuse(
                ErrorCode.FORBIDDEN,
                f"{name} names a program to run, so it is taken from the settings file only",
                param=name,
            )


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of a Struct of settings; each property with its `unit`, `enum` and `needs` where it has them."""
    (_,), parts = msgspec.json.schema_components([struct], schema_hook=lambda kind: {"type": "string"})
    schema: dict[str, Any] = {**parts.pop(struct.__name__)}
    for name, known in _known(struct).items():
        about = schema["properties"][name]
        about["needs"] = known.needs
        if known.unit:
            about["unit"] = known.unit
        if known.choices:
            about["enum"] = [*known.choices, *([None] if known.default is None else [])]
    if parts:
        schema["$defs"] = parts
    return schema


def _known(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return fields() if struct is Settings else fields_of(struct)
