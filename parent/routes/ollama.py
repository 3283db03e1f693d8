"""Ollama's `/api`: chat and generate as another wire format, vectors, and its views of models.

Names may end in `:latest`, which means nothing here. Refusals before an answer are written by `Front`, in its shape.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from parent.inference.forward import Forwarder
from parent.inference.record import Reading
from parent.library.abilities import abilities
from parent.library.catalog import ModelEntry
from parent.pool import operators
from parent.pool.desk import Phase
from parent.pool.host import Host
from parent.pool.lease import Lease
from parent.pool.refusal import not_for, without_adapters
from parent.protocols.base import PLAIN, DecodedRequest, Manners, Protocol
from parent.protocols.ollama import embed as ollama_embed
from parent.protocols.ollama import fields as ollama_fields
from parent.protocols.ollama import formats as ollama
from parent.protocols.ollama import models as ollama_models
from parent.protocols.ollama.answer import Clock, Line, Moment, chat_line, generate_line, moved
from parent.protocols.ollama.errors import error
from parent.protocols.ollama.models import Details, Listed, Running, Show, ShowBody
from parent.protocols.openai import embeddings as openai_embeddings
from parent.routes.inference import InferenceRoute, client_of, declared_length, read
from parent.routes.text import ask
from parent.workers.client import WorkerClient
from shared import asgi, wire
from shared.errors import ErrorCode, Failure, Refused
from shared.version import VERSION

MOST_BYTES = 64 * 1024
NEVER, LONGEST_S = "9999-12-31T23:59:59Z", 1e11  # seconds; what is longer has no date


class OllamaRoutes:
    """The routes but `/api/pull`."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder = forwarder
        self.pool = forwarder.pool

    # ------------------------------------------------------------ answers

    async def chat(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        clock = _clock()
        await self._answer(scope, receive, send, ollama.chat(clock), chat_line, clock)

    async def generate(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        clock = _clock()
        await self._answer(scope, receive, send, ollama.generate(clock), generate_line, clock)

    async def _answer(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        protocol: Protocol,
        line: Line,
        clock: Clock,
    ) -> None:
        asked = await read(scope, receive, self.pool.settings, protocol.decode)
        asked = replace(asked, model=self._name(asked.model))
        if asked.prompts:
            await InferenceRoute(protocol, self.forwarder).answer(scope, receive, send, asked)
            return

        async def work() -> None:
            entry, reason = await self._move(asked, client_of(scope))
            await asgi.respond(send, 200, moved(asked.model or entry.id, line, clock, reason))

        await asgi.run_until_gone(receive, work)

    async def _move(self, asked: DecodedRequest, client: str) -> tuple[ModelEntry, str]:
        """Load a model, or let it go where it is to be kept no time at all. Raises `Refused`."""
        entry = (await self.pool.roster.choose(asked.model)).entry
        if asked.keep_alive_s == 0:
            host = self.pool.roster.hosts.get(entry.id)
            if host is not None and host.slot.phase is not Phase.ABSENT:
                operators.unload(self.pool, host, "drain")
            return entry, "unload"
        lease = self.pool.ask(entry, client, asked.keep_alive_s)
        try:
            await lease.grant()
        finally:
            lease.release()
        return entry, "load"

    async def embed(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /api/embed`."""
        clock = _clock()

        def write(found: wire.EmbedResult, named: str) -> bytes:
            total = clock().elapsed_ns
            rows = ollama_embed.rows(found)
            return msgspec.json.encode(ollama_embed.Embedded(named, rows, total, 0, found.tokens))

        await self._embedded(scope, receive, send, ollama_embed.decode, write)

    async def embeddings(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /api/embeddings`, the old one."""

        def write(found: wire.EmbedResult, named: str) -> bytes:
            first = next(iter(ollama_embed.rows(found)), [])
            return msgspec.json.encode(ollama_embed.Embedding(first))

        await self._embedded(scope, receive, send, ollama_embed.decode_old, write)

    async def _embedded(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        decode: Callable[[bytes, Manners], openai_embeddings.Asked],
        write: Callable[[wire.EmbedResult, str], bytes],
    ) -> None:
        with Reading("embeddings") as record:
            await self._read(scope, receive, send, decode, write, record)

    async def _read(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        decode: Callable[[bytes, Manners], openai_embeddings.Asked],
        write: Callable[[wire.EmbedResult, str], bytes],
        record: Reading,
    ) -> None:
        asked = await read(scope, receive, self.pool.settings, decode)
        record.inputs = len(asked.request.inputs)
        choice = await self.pool.roster.choose(self._name(asked.model))
        record.model = choice.entry.id
        without_adapters(choice)
        if choice.entry.kind == "reranker":
            raise not_for(choice.entry, "and has no vectors")

        async def question(client: WorkerClient, lease: Lease) -> wire.EmbedResult:
            if not asked.request.inputs:  # the model is only to be loaded
                return wire.EmbedResult(b"", 0, 0)
            return await client.embed(asked.request)

        async def work() -> None:
            found = await ask(self.pool, choice, client_of(scope), question, asked.keep_alive_s)
            record.prompt_tokens = found.tokens
            named = asked.model or choice.entry.id
            await asgi.respond(send, 200, await asyncio.to_thread(write, found, named))

        if not await asgi.run_until_gone(receive, work):
            record.left()

    def _name(self, name: str) -> str:
        """Without the tag that every model of Ollama has, unless there is such a name."""
        if name.endswith(":latest"):
            try:
                self.pool.roster.library.resolve(name)
            except Refused:
                return name.removesuffix(":latest")
        return name

    # ------------------------------------------------------------ models

    async def tags(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /api/tags`."""
        await self.pool.look()
        entries = [entry for entry in self.pool.roster.library.entries if not entry.error]
        rows = await asyncio.to_thread(lambda: [self._listed(entry) for entry in entries])
        await asgi.respond(send, 200, msgspec.json.encode(ollama_models.Tags(rows)))

    async def show(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /api/show`."""
        asked = ollama_fields.parse(await self._small(scope, receive), ShowBody, PLAIN)
        entry = (await self.pool.roster.known(self._name(asked.named))).entry
        shown = await asyncio.to_thread(self._shown, entry)
        await asgi.respond(send, 200, msgspec.json.encode(shown))

    async def ps(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /api/ps`: what is in memory."""
        hosts = [host for host in self.pool.roster.hosts.values() if host.slot.phase is Phase.READY]
        rows = [self._running(host) for host in hosts]
        await asgi.respond(send, 200, msgspec.json.encode(ollama_models.Ps(rows)))

    async def version(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /api/version`."""
        answer = ollama_models.Version(ollama.VERSION, VERSION)
        await asgi.respond(send, 200, msgspec.json.encode(answer))

    async def refuse(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Models here are folders and the hub's: there is nothing to create, copy or push."""
        message = f"{scope['path']} is not supported here; see `mlxd pull`, `mlxd import` and `mlxd rm`"
        _, body = error(Failure(ErrorCode.UNSUPPORTED, message))
        await asgi.respond(send, 501, body)

    def _facts(self, entry: ModelEntry) -> wire.ModelFacts | None:
        host = self.pool.roster.hosts.get(entry.id)
        return host.supervisor.facts if host else None

    def _details(self, entry: ModelEntry) -> Details:
        facts = self._facts(entry)
        context = facts.context if facts else entry.context
        level = entry.quantization or entry.dtype
        return Details(entry.family, [entry.family], level, context)

    def _listed(self, entry: ModelEntry) -> Listed:
        able = ollama_models.capabilities(abilities(entry, self._facts(entry)))
        return Listed(
            entry.id,
            entry.id,
            _modified(entry),
            entry.bytes,
            _digest(entry),
            self._details(entry),
            able,
        )

    def _shown(self, entry: ModelEntry) -> Show:
        facts, family = self._facts(entry), entry.family
        context = facts.context if facts else entry.context
        width = entry.config.get("hidden_size")
        info = {
            "general.architecture": family,
            "general.basename": entry.id,
            f"{family}.context_length": context,
            f"{family}.embedding_length": width if isinstance(width, int) else 0,
            f"{family}.block_count": entry.config.get("num_hidden_layers", 0),
        }
        defaults = facts.defaults if facts else wire.Sampling()
        told = {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return Show(
            _modified(entry),
            self._details(entry),
            info,
            ollama_models.capabilities(abilities(entry, facts)),
            ollama_models.parameters(told),
        )

    def _running(self, host: Host) -> Running:
        slot, entry = host.slot, host.entry
        held = self.pool.desk.ledger.held_by(slot.account) or entry.bytes
        details = self._details(entry)
        left_s = max(0.0, slot.last_used + slot.keep_alive_s - time.monotonic())
        expires = NEVER if left_s > LONGEST_S else _stamp(time.time() + left_s)
        return Running(
            entry.id, entry.id, held, _digest(entry), details, expires, held, details.context_length
        )

    async def _small(self, scope: asgi.Scope, receive: asgi.Receive) -> bytes:
        return await asgi.read_body(
            receive,
            MOST_BYTES,
            declared=declared_length(scope),
            silence_s=self.pool.settings.request_wait_s,
        )


def _clock() -> Clock:
    """That of one request."""
    began = time.monotonic_ns()
    return lambda: Moment(_stamp(time.time()), time.monotonic_ns() - began)


def _stamp(seconds: float) -> str:
    """RFC 3339 of seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _digest(entry: ModelEntry) -> str:
    """Another one when the files are."""
    return hashlib.sha256(entry.signature.encode()).hexdigest()


def _modified(entry: ModelEntry) -> str:
    try:
        return _stamp(entry.path.stat().st_mtime)
    except OSError:  # gone meanwhile
        return _stamp(0)
