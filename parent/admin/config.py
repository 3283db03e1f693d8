"""Operators' routes for the configuration: what is in force and why, and changes of it while serving."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from parent.bodies import read_json
from parent.config import Settings, fields
from parent.library.catalog import folder_of
from parent.library.names import Found
from parent.live_config import LiveConfig, PatchResult
from parent.model_options import ModelOptions
from parent.pool.models import RESIDENT
from parent.values import fields_of
from shared import asgi
from shared.errors import ErrorCode, Refused, refuse

MOST_BYTES = 1 << 20


class Config:
    """`GET /admin/config` and `PATCH /admin/config`. `known`: the model of a name, else `Refused`."""

    def __init__(self, live: LiveConfig, known: Callable[[str], Awaitable[Found]]) -> None:
        self.live = live
        self.known = known
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
        values = await read_json(
            receive,
            dict[str, Any],
            MOST_BYTES,
            silence_s=self.live.settings.request_wait_s,
            shape="a JSON object of settings",
            nothing=b"",
        )
        _refuse_programs(values)
        async with self._patching:
            await asyncio.to_thread(self.live.write, values)  # it waits for the disk
            self.live.reload()
            results = self.live.results(values)
        results = [await self._with_note(result) for result in results]
        await asgi.respond(send, 200, msgspec.json.encode({"results": results}))

    async def _with_note(self, result: PatchResult) -> PatchResult:
        """A model may be named before it is here, but a name that was misspelt should not go unseen."""
        name, value = result.name, result.value
        if value in (None, ""):
            return result
        if name.startswith("models."):
            note = await self._absent(name.removeprefix("models."), as_key=True)
        elif (name == "fallback" and value != RESIDENT) or (name == "model" and folder_of(value) is None):
            note = await self._absent(value)
        else:
            return result
        notes = [each for each in (result.note, note) if each]
        return msgspec.structs.replace(result, note="; ".join(notes))

    async def _absent(self, name: str, *, as_key: bool = False) -> str:
        """`as_key`: a table of the settings file needs the id or a name of the card, not just any name."""
        try:
            entry = (await self.known(name)).entry
        except Refused:
            return f"there is no model {name!r} now"
        if as_key and name not in (entry.id, *entry.aliases):
            return f"there is no model of the id {name!r} now; did you mean {entry.id}?"
        return ""


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
