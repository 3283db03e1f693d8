"""`POST /tokenize`, `/detokenize`, `/apply-template`, and Anthropic's `count_tokens`: a model is leased as for an
answer, and asked about text only.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from parent.inference.profiles import apply
from parent.pool.lease import Lease
from parent.pool.models import Choice
from parent.pool.pool import Pool
from parent.protocols import text
from parent.protocols.anthropic import request as anthropic
from parent.routes.inference import client_of, read
from parent.workers.client import WorkerClient, WorkerLost
from shared import asgi, wire
from shared.errors import ErrorCode, refuse

TRIES = 3  # on so many workers, should they die meanwhile

T = TypeVar("T", bound=msgspec.Struct)
Question = Callable[[WorkerClient, Lease], Awaitable[T]]


class TextRoutes:
    """The routes. Refusals are written by `Front`, in the shape of the path."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def tokenize(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The ids of a text, or of the prompt that messages become."""
        wanted = await read(scope, receive, self.pool.settings, text.decode_text)
        choice = await self.pool.roster.choose(wanted.asked.model)

        async def question(client: WorkerClient, lease: Lease) -> msgspec.Struct:
            rendered = await _render(client, wanted, choice)
            facts = lease.host.supervisor.facts
            tokens: Sequence[int | text.Piece] = rendered.ids
            if wanted.with_pieces:
                tokens = text.pieces(rendered.ids, (await client.detokenize(rendered.ids)).pieces)
            return text.Tokens(tokens, len(rendered.ids), facts.context if facts else 0)

        await self._answer(scope, receive, send, choice, question)

    async def detokenize(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The text of ids."""
        wanted = await read(scope, receive, self.pool.settings, text.decode_ids)
        choice = await self.pool.roster.choose(wanted.model or "")

        async def question(client: WorkerClient, lease: Lease) -> msgspec.Struct:
            found = await client.detokenize(wanted.tokens)
            return text.Content(found.text, found.text)

        await self._answer(scope, receive, send, choice, question)

    async def apply_template(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The prompt that messages become."""
        wanted = await read(scope, receive, self.pool.settings, text.decode_messages)
        choice = await self.pool.roster.choose(wanted.asked.model)

        async def question(client: WorkerClient, lease: Lease) -> msgspec.Struct:
            rendered = await _render(client, wanted, choice)
            return text.Applied(rendered.text, len(rendered.ids))

        await self._answer(scope, receive, send, choice, question)

    async def count_tokens(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """How long the prompt of a conversation in Anthropic's format is."""
        wanted = await read(scope, receive, self.pool.settings, anthropic.decode_count)
        choice = await self.pool.roster.choose(wanted.asked.model)

        async def question(client: WorkerClient, lease: Lease) -> msgspec.Struct:
            return anthropic.TokenCount(len((await _render(client, wanted, choice)).ids))

        await self._answer(scope, receive, send, choice, question)

    async def _answer(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send, choice: Choice, question: Question[T]
    ) -> None:
        """Ask the model's worker, with a place in the queue, so that it is loaded, and not evicted meanwhile."""

        async def work() -> None:
            answer = await ask(self.pool, choice, client_of(scope), question)
            headers = [(b"x-mlxd-fallback", choice.entry.id.encode())] if choice.is_fallback else []
            await asgi.respond(send, 200, msgspec.json.encode(answer), headers)

        await asgi.run_until_gone(receive, work)


async def ask(
    pool: Pool,
    choice: Choice,
    client_name: str,
    question: Question[T],
    keep_alive_s: float | None = None,
) -> T:
    """The worker's answer; that of the next one where it is lost. Raises `Refused`."""
    lease = pool.ask(choice.entry, client_name, keep_alive_s)
    try:
        for _ in range(TRIES):
            client = await lease.grant()
            try:
                return await question(client, lease)
            except WorkerLost as lost:
                lease.is_suspect = lost.reached
    finally:
        lease.release()
    raise refuse(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the worker died {TRIES} times under this request; it is not tried again",
    )


async def _render(client: WorkerClient, wanted: text.Rendering, choice: Choice) -> wire.RenderResult:
    [prompt] = apply(wanted.asked, choice.profile).prompts
    return await client.render(
        prompt, add_special=wanted.add_special, add_generation_prompt=wanted.add_generation_prompt
    )
