"""`/v1/models`, `/v1/models/{id}` and its `load` and `unload`: what can be served, under each of its names."""

import asyncio
import urllib.parse
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from parent.bodies import read_json
from parent.library.abilities import abilities
from parent.library.adapters import Shelved
from parent.library.catalog import ModelEntry
from parent.pool import operators
from parent.pool.desk import Phase
from parent.pool.estimate import Room, room_of
from parent.pool.host import Host
from parent.pool.pool import Pool
from parent.pool.refusal import refusal
from parent.protocols import model_rows
from parent.protocols.model_rows import ModelInfo, ModelList, ModelRow, ModelState, Moved
from parent.protocols.openai.fields import kept_for
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared import asgi, wire
from shared.errors import ErrorCode, Refused, refuse

MOST_BYTES = 64 * 1024


class LoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST …/load`. `wait`: answer only when the model is ready, or cannot be."""

    wait: bool = False
    keep_alive: float | str | None = None


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST …/unload`."""

    mode: operators.Mode = "drain"
    wait: bool = False


class Models:
    """The routes. `created` is the start of the server: a folder has no date of its own to offer."""

    def __init__(self, pool: Pool, created: int) -> None:
        self.pool = pool
        self.created = created

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """In Anthropic's shape to its clients, which are known by their `anthropic-version`."""
        await self.pool.look()
        entries = [entry for entry in self.pool.roster.library.entries if not entry.error]
        rows = await asyncio.to_thread(lambda: [row for entry in entries for row in self._rows(entry)])
        answer: msgspec.Struct = ModelList(data=rows)
        if speaks_anthropic(scope):
            query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))
            answer = model_rows.page([self._info(row) for row in rows], query)
        await asgi.respond(send, 200, msgspec.json.encode(answer))

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        found = await self.pool.roster.known(scope["path_params"]["id"])
        row = await asyncio.to_thread(lambda: self._row(found.entry, self._adapters(found.entry)))
        if found.adapters:
            name = "+".join(one.id for one in found.adapters)
            row = self._with_adapter(row, found.entry, name, sum(map(_bytes_of, found.adapters)))
        answer = self._info(row) if speaks_anthropic(scope) else row
        await asgi.respond(send, 200, msgspec.json.encode(answer))

    async def load(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """202 with the state, or with `wait` 200 once it is ready."""
        body = await self._body(receive, LoadBody)
        entry = await self._entry(scope)
        host = operators.load(self.pool, entry, kept_for(body.keep_alive))
        if not body.wait:
            await self._say(send, host, 200 if host.slot.phase is Phase.READY else 202)
        elif await asgi.run_until_gone(receive, lambda: self._until_loaded(host)):
            answer = Moved(entry.id, State.READY, Phase.READY)
            await asgi.respond(send, 200, msgspec.json.encode(answer))

    async def _body(self, receive: asgi.Receive, kind: type[Any]) -> Any:
        """A small JSON body, or the defaults where there is none. Raises `Refused`."""
        return await read_json(receive, kind, MOST_BYTES, silence_s=self.pool.settings.request_wait_s)

    async def _entry(self, scope: asgi.Scope) -> ModelEntry:
        return (await self.pool.roster.known(scope["path_params"]["id"])).entry

    async def _until_loaded(self, host: Host) -> None:
        lease = self.pool.ask(host.entry)
        try:
            await lease.grant()
        finally:
            lease.release()

    async def unload(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """202 with the state, or with `wait` 200 once the process has gone and its memory is back."""
        body = await self._body(receive, UnloadBody)
        entry = await self._entry(scope)
        host = self.pool.roster.hosts.get(entry.id)
        if host is None:
            raise refuse(ErrorCode.CONFLICT, f"{entry.id} is not loaded")
        leaving = host.supervisor
        operators.unload(self.pool, host, body.mode)
        if body.wait:
            await asgi.run_until_gone(receive, lambda: _until_gone(leaving))
        await self._say(send, host, 200 if host.slot.phase is Phase.ABSENT else 202)

    async def _say(self, send: asgi.Send, host: Host, status: int) -> None:
        failure = refusal(host.supervisor)
        if failure is not None and host.slot.phase is Phase.REFUSED:
            raise Refused(failure)
        answer = Moved(host.entry.id, host.supervisor.state, host.slot.phase)
        await asgi.respond(send, status, msgspec.json.encode(answer))

    def _info(self, row: ModelRow) -> ModelInfo:
        created = datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")
        return model_rows.info(row, created)

    def _rows(self, entry: ModelEntry) -> list[ModelRow]:
        """Of a model, and of it with each of its adapters."""
        adapters = self._adapters(entry)
        row = self._row(entry, adapters)
        return [row, *(self._with_adapter(row, entry, one.id, _bytes_of(one)) for one in adapters)]

    def _adapters(self, entry: ModelEntry) -> list[Shelved]:
        return self.pool.roster.library.adapters_of(entry) if entry.kind == "chat" else []

    def _with_adapter(self, row: ModelRow, entry: ModelEntry, adapter: str, num_bytes: int) -> ModelRow:
        room = self._room(entry, num_bytes)
        return replace(model_rows.with_adapter(row, adapter, num_bytes), **asdict(room))

    def _room(self, entry: ModelEntry, adapters: int = 0) -> Room:
        """Whether it fits on this machine, as the settings in force would load it."""
        device = replace(self.pool.device, budget_bytes=self.pool.desk.ledger.usable)
        return room_of(entry, self.pool.roster.launch(entry), device, adapters)

    def _row(self, entry: ModelEntry, adapters: list[Shelved]) -> ModelRow:
        host = self.pool.roster.hosts.get(entry.id)
        facts = host.supervisor.facts if host else None
        phase = host.slot.phase if host else Phase.ABSENT
        options = self.pool.roster.library.options(entry.id)
        context = facts.context if facts else entry.context
        family = facts.family if facts else entry.family
        return ModelRow(
            id=entry.id,
            created=self.created,
            aliases=[name for name in self.pool.roster.library.names(entry) if name != entry.id],
            profiles=list(options.profiles),
            adapters=[one.id for one in adapters],
            kind=entry.kind,
            capabilities=list(abilities(entry, facts)),
            modalities=model_rows.modalities(entry.kind),
            context_window=context,
            context_length=context,
            max_model_len=context,
            max_context_length=context,
            quantization=entry.quantization,
            bytes=entry.bytes,
            size_bytes=entry.bytes,
            family=family,
            arch=family,
            root=entry.root,
            support=entry.support,
            **asdict(self._room(entry)),
            state=_STATES[phase],
            worker=host.supervisor.state if host else State.ABSENT,
            resident=phase is Phase.READY,
            loading=phase is Phase.LOADING,
            pinned=options.pin,
            gen_defaults=model_rows.defaults(facts.defaults if facts else wire.Sampling()),
        )


def _bytes_of(one: Shelved) -> int:
    return one.adapter.num_bytes if one.adapter else 0


_STATES: dict[Phase, ModelState] = {
    Phase.ABSENT: "on_disk",
    Phase.LOADING: "loading",
    Phase.READY: "resident",
    Phase.LEAVING: "leaving",
    Phase.REFUSED: "failed",
}


def speaks_anthropic(scope: asgi.Scope) -> bool:
    """Whether its client speaks Anthropic's API, where the path is everybody's."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


async def _until_gone(supervisor: Supervisor) -> None:
    """Returns when its process has gone, though a new one may be there already."""
    epoch = supervisor.life.epoch
    while supervisor.state is not State.ABSENT and supervisor.life.epoch == epoch:
        await supervisor.changed()
