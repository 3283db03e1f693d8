"""`POST /v1/embeddings` and `POST /v1/rerank`: a model is leased as for an answer, and asked to read."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from parent.inference.record import Reading
from parent.pool.lease import Lease
from parent.pool.models import Choice
from parent.pool.pool import Pool
from parent.pool.refusal import not_for, without_adapters
from parent.protocols import rerank
from parent.protocols.openai import embeddings as openai_embeddings
from parent.routes.inference import client_of, read
from parent.routes.text import Question, ask
from parent.workers.client import WorkerClient
from shared import asgi, wire

T = TypeVar("T", wire.EmbedResult, wire.RankResult)
WRITE_HERE = 64 * 1024  # bytes of vectors; more are written as JSON in a thread, beside the loop


class EmbeddingRoutes:
    """The routes. Refusals are written by `Front`, in the shape of OpenAI."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def embeddings(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The vectors of texts."""
        with Reading("embeddings") as record:
            await self._embeddings(scope, receive, send, record)

    async def _embeddings(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send, record: Reading
    ) -> None:
        asked = await read(scope, receive, self.pool.settings, openai_embeddings.decode)
        record.inputs = len(asked.request.inputs)
        choice = await self.pool.roster.choose(asked.model, ("embedding",))
        record.model = choice.entry.id
        without_adapters(choice)
        if choice.entry.kind == "reranker":
            raise not_for(choice.entry, "and has no vectors")

        async def question(client: WorkerClient, lease: Lease) -> wire.EmbedResult:
            return await client.embed(asked.request)

        def write(found: wire.EmbedResult) -> bytes:
            named = _named(choice, asked.model)
            return msgspec.json.encode(openai_embeddings.answer(found, named, as_base64=asked.as_base64))

        await self._answer(scope, receive, send, choice, asked.keep_alive_s, question, write, record)

    async def rerank(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Documents by how well they answer a query."""
        with Reading("rerank") as record:
            await self._rerank(scope, receive, send, record)

    async def _rerank(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send, record: Reading
    ) -> None:
        asked = await read(scope, receive, self.pool.settings, rerank.decode)
        record.inputs = len(asked.request.documents)
        choice = await self.pool.roster.choose(asked.model, ("reranker", "embedding"))
        record.model = choice.entry.id
        without_adapters(choice)

        async def question(client: WorkerClient, lease: Lease) -> wire.RankResult:
            return await client.rank(asked.request)

        def write(found: wire.RankResult) -> bytes:
            named = _named(choice, asked.model)
            return msgspec.json.encode(rerank.answer(asked, found, named, scope["request_id"]))

        await self._answer(scope, receive, send, choice, asked.keep_alive_s, question, write, record)

    async def _answer(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        choice: Choice,
        keep_alive_s: float | None,
        question: Question[T],
        write: Callable[[T], bytes],
        record: Reading,
    ) -> None:
        async def work() -> None:
            found = await ask(self.pool, choice, client_of(scope), question, keep_alive_s)
            record.prompt_tokens = found.tokens
            is_long = isinstance(found, wire.EmbedResult) and len(found.vectors) > WRITE_HERE
            body = await asyncio.to_thread(write, found) if is_long else write(found)
            headers = [(b"x-mlxd-fallback", choice.entry.id.encode())] if choice.is_fallback else []
            await asgi.respond(send, 200, body, headers)

        if not await asgi.run_until_gone(receive, work):
            record.left()


def _named(choice: Choice, asked: str) -> str:
    """The model as the client calls it, or the one that stood in for it."""
    return asked if asked and not choice.is_fallback else choice.entry.id
