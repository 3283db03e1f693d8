"""`/v1/responses`: create one, and what can be asked of those that are stored or run in the background."""

import asyncio
import re
import urllib.parse

import msgspec

from parent.inference.background import Background, Run
from parent.inference.forward import Forwarder
from parent.inference.history import History
from parent.inference.profiles import apply
from parent.inference.record import Record
from parent.pool.lease import Lease
from parent.protocols import sse
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.responses import decode as responses
from parent.protocols.responses import items as responses_items
from parent.protocols.responses import stored
from parent.protocols.responses.items import Item
from parent.protocols.responses.request import ResponsesRequest
from parent.routes.inference import admit, client_of, read
from parent.routes.responses_making import Maker
from parent.routes.text import ask
from parent.workers.client import WorkerClient
from shared import asgi
from shared.errors import Refused


class InputTokens(msgspec.Struct, frozen=True):
    """`POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class Deleted(msgspec.Struct, frozen=True):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


class ResponsesRoutes:
    """Refusals before an answer are written by `Front`, in OpenAI's shape."""

    def __init__(self, forwarder: Forwarder, history: History, background: Background) -> None:
        self.forwarder = forwarder
        self.history = history
        self.background = background
        self.maker = Maker(forwarder, history, background)

    # ------------------------------------------------------------ create

    async def create(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /v1/responses`."""
        record = Record()
        run: Run | None = None
        try:
            asked = await self._complete(await self._read(scope, receive))
            admitted = await admit(scope, asked, self.forwarder, record)
            if asked.ignored:
                admitted.headers.append((b"x-mlxd-ignored-tools", _plain(asked.ignored)))
            if asked.shown.background:
                run = await self.maker.start(admitted, record)
            elif asked.stream:
                await self.maker.stream(scope, receive, send, admitted, record)
            else:
                await self.maker.whole(receive, send, admitted, record)
        except Refused as refused:
            record.end = refused.failure.code
            raise
        except asgi.ClientGone:
            record.end = "left"
            raise
        finally:
            if run is None:
                record.write()
        if run is not None:
            if asked.stream:
                await self._follow(receive, send, run, 0, admitted.headers)
            else:
                await asgi.respond(send, 200, run.snapshot(), admitted.headers)

    async def _read(self, scope: asgi.Scope, receive: asgi.Receive) -> ResponsesRequest:
        return await read(scope, receive, self.forwarder.pool.settings, responses.parse)

    async def _complete(self, asked: ResponsesRequest) -> ResponsesRequest:
        """With what is stored of the conversation, and of the items that are only named. Raises `Refused`."""
        previous = asked.shown.previous_response_id
        running = self.background.all_running  # before its row is read: what ends meanwhile is not lost
        deltas = await self.history.expand(previous) if previous else []
        known: dict[str, Item] = {}
        for name in responses_items.references(asked.items):
            if name not in known:
                known |= await self._items_beside(name)
        if not deltas and len(asked.items) < 100:
            return responses.completed(asked, [], known)
        return await asyncio.to_thread(
            lambda: responses.completed(asked, stored.conversation(deltas, running), known)
        )

    async def _items_beside(self, name: str) -> dict[str, Item]:
        """The items of the stored response that this one is of, by their ids."""
        try:
            delta = (await self.history.get(responses_items.owner_of(name))).delta
        except Refused as refused:
            raise responses_items.no_such_item(name) from refused
        return {item["id"]: item for item in [*stored.input_of(delta), *stored.kept(delta).output]}

    async def _follow(
        self, receive: asgi.Receive, send: asgi.Send, run: Run, start: int, headers: asgi.Headers = ()
    ) -> None:
        async def work() -> None:
            await asgi.start(send, 200, [*sse.HEADERS, *headers])
            async for frames in run.follow(start, self.forwarder.pool.settings.keepalive_s):
                await asgi.send_chunk(send, frames or sse.KEEP_ALIVE)
            await asgi.send_chunk(send, b"", more=False)

        await asgi.run_until_gone(receive, work)

    # ------------------------------------------------------------ stored ones

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /v1/responses/{id}`; with `stream=true` the events of one in the background."""
        id, query = scope["path_params"]["id"], query_of(scope)
        running = self.background.running(id)
        link = None if running is not None else await self.history.get(id)
        if query.get("stream", "false").lower() in ("true", "1"):
            start = _starting_after(query) + 1
            run = self.background.get(id)
            if run is None:
                raise unsupported(
                    "stream",
                    f"is not possible for {id}: events are kept of responses in the background, and not for ever; "
                    "ask without stream",
                )
            await self._follow(receive, send, run, start)
            return
        body = stored.response_of(link.delta) if link is not None else b""
        await asgi.respond(send, 200, body if running is None else running.snapshot())

    async def delete(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`DELETE /v1/responses/{id}`; one that runs is cancelled first."""
        id = scope["path_params"]["id"]
        if (run := self.background.running(id)) is not None:
            await run.cancel()
        await self.history.forget(id)
        self.background.forget(id)
        await asgi.respond(send, 200, msgspec.json.encode(Deleted(id)))

    async def cancel(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /v1/responses/{id}/cancel`; one that is over stays as it is."""
        id = scope["path_params"]["id"]
        if (run := self.background.running(id)) is not None:
            await run.cancel()
        delta = (await self.history.get(id)).delta
        if not stored.kept(delta).background:
            raise invalid("id", f"only a response in the background can be cancelled, and {id} is none")
        await asgi.respond(send, 200, stored.response_of(delta))

    async def input_items(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /v1/responses/{id}/input_items`: all that the response was made of."""
        query, running = query_of(scope), self.background.all_running
        *past, last = await self.history.expand(scope["path_params"]["id"])
        before = stored.conversation(past, running)
        listed = stored.page([*before, *stored.input_of(last)], query)
        await asgi.respond(send, 200, msgspec.json.encode(listed))

    async def input_tokens(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /v1/responses/input_tokens`: how many tokens the prompt of a request has."""
        asked = await self._complete(await self._read(scope, receive))
        choice = await self.forwarder.pool.roster.choose(asked.model)
        [prompt] = apply(asked, choice.profile).prompts

        async def count(client: WorkerClient, lease: Lease) -> msgspec.Struct:
            rendered = await client.render(prompt, add_special=True, add_generation_prompt=True)
            return InputTokens(len(rendered.ids))

        async def work() -> None:
            counted = await ask(self.forwarder.pool, choice, client_of(scope), count)
            await asgi.respond(send, 200, msgspec.json.encode(counted))

        await asgi.run_until_gone(receive, work)


def _plain(names: list[str]) -> bytes:
    """As they may stand in a header."""
    joined = ",".join(name[:40] for name in names[:20])
    return re.sub(r"[^!-~]", "?", joined).encode()


def query_of(scope: asgi.Scope) -> dict[str, str]:
    """The parameters behind the path; of one that stands twice the last."""
    return dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))


def _starting_after(query: dict[str, str]) -> int:
    given = query.get("starting_after", "-1")
    if given == "-1":
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= 15):
        raise invalid("starting_after", "must be the sequence_number of an event")
    return int(given)
