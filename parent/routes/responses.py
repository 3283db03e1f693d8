"""`/v1/responses`: create one, and what can be asked of those that are stored or run in the background.

A response is stored when it is whole, before its last frame leaves, so that a client that has seen the end can follow
on at once. What fails or is cancelled is no answer: only a response in the background leaves a trace of it.
"""

import asyncio
import logging
import re
import time
import urllib.parse

import msgspec
from msgspec.structs import replace

from parent.inference.background import STOPPED, Background, Run
from parent.inference.forward import Forwarder
from parent.inference.history import History
from parent.inference.profiles import apply
from parent.inference.record import Record
from parent.inference.reply import Emit, send_stream
from parent.pool.lease import Lease
from parent.protocols import responses, responses_items, sse
from parent.protocols import responses_stored as stored
from parent.protocols.base import Answer
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.responses_items import Item
from parent.protocols.responses_object import Response, error_of, whole
from parent.protocols.responses_request import ResponsesRequest, asked_of
from parent.protocols.responses_stream import ResponseStream
from parent.routes.inference import Admitted, admit, client_of, forwarded, read
from parent.routes.text import ask
from parent.workers.client import WorkerClient
from shared import asgi, wire
from shared.errors import ErrorCode, Failure, Refused
from shared.logs import event

log = logging.getLogger(__name__)
SHORTER = 4  # so often is a prompt that is too long made shorter


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
                run = await self._start(admitted, record)
            elif asked.stream:
                await self._stream(scope, receive, send, admitted, record)
            else:
                await self._whole(receive, send, admitted, record)
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
        deltas = await self.history.expand(previous) if previous else []
        known: dict[str, Item] = {}
        for name in responses_items.references(asked.items):
            if name not in known:
                known |= await self._items_beside(name)
        if not deltas and len(asked.items) < 100:
            return responses.completed(asked, [], known)
        return await asyncio.to_thread(lambda: responses.completed(asked, stored.conversation(deltas), known))

    async def _items_beside(self, name: str) -> dict[str, Item]:
        """The items of the stored response that this one is of, by their ids."""
        try:
            delta = (await self.history.get(responses_items.owner_of(name))).delta
        except Refused as refused:
            raise responses_items.no_such_item(name) from refused
        return {item["id"]: item for item in [*stored.input_of(delta), *stored.kept(delta).output]}

    async def _whole(
        self, receive: asgi.Receive, send: asgi.Send, admitted: Admitted, record: Record
    ) -> None:
        answer = Answer()

        async def gather(events: list[wire.Event], choice: int) -> None:
            answer.add(events)

        async def work() -> None:
            await self._forward(admitted, gather, record)
            response = whole(admitted.meta, answer, int(time.time()))
            if response.store and not await self._remember(admitted, response):
                response = replace(response, store=False)
            await asgi.respond(send, 200, msgspec.json.encode(response), admitted.headers)

        if not await asgi.run_until_gone(receive, work) and record.finish is None:
            record.end = "left"

    async def _stream(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        admitted: Admitted,
        record: Record,
    ) -> None:
        encoder = ResponseStream(admitted.meta, lambda: int(time.time()))

        async def forward(emit: Emit) -> None:
            async def kept_first(events: list[wire.Event], choice: int) -> None:
                last = events[-1]
                if isinstance(last, wire.Finish):
                    if len(events) > 1:
                        await emit(events[:-1], choice)
                    await self._end(admitted, encoder, last)
                    events = [last]
                await emit(events, choice)

            await self._forward(admitted, kept_first, record)

        async def work() -> None:
            await send_stream(
                send,
                scope["body_send"],
                responses.PROTOCOL._replace(stream=lambda _: encoder),
                admitted.meta,
                forward,
                keepalive_s=self.forwarder.pool.settings.keepalive_s,
                status=record.status,
                headers=admitted.headers,
            )

        if not await asgi.run_until_gone(receive, work) and record.finish is None:
            record.end = "left"

    async def _end(self, admitted: Admitted, encoder: ResponseStream, finish: wire.Finish) -> None:
        """Store a whole response before its end is told."""
        response = encoder.end(finish)
        if response.store and not await self._remember(admitted, response):
            encoder.not_stored()

    async def _forward(self, admitted: Admitted, emit: Emit, record: Record) -> None:
        """Its events; with `truncation` auto, of a shorter prompt where it is too long. Raises `Refused`."""
        asked = asked_of(admitted.meta)
        for _ in range(SHORTER if asked.shown.truncation == "auto" else 0):
            try:
                await forwarded(self.forwarder, admitted, emit, record)
                return
            except Refused as refused:
                shorter = responses.truncated(asked, refused.failure)
                if shorter is None:
                    raise
                asked = shorter
                again = [replace(each, prompt=asked.prompts[0]) for each in admitted.requests]
                admitted = admitted._replace(requests=again)
        await forwarded(self.forwarder, admitted, emit, record)

    async def _remember(self, admitted: Admitted, response: Response, *, over: bool = False) -> bool:
        """Whether it is stored. `over`: in the place of what was stored when it began."""
        if response.status == "cancelled" and not over:
            return False
        store = self.history.replace if over else self.history.remember
        items = responses_items.numbered(asked_of(admitted.meta).items, admitted.meta.id)
        delta = stored.encode(items, response)
        try:
            return await store(response.id, response.previous_response_id, delta, admitted.order.entry.id)
        except Refused as refused:
            event(log, "response.not_stored", level=logging.WARNING, id=response.id, reason=str(refused))
            return False

    # ------------------------------------------------------------ in the background

    async def _start(self, admitted: Admitted, record: Record) -> Run:
        """Store it as queued, and begin. Raises `Refused` where it cannot be stored."""
        encoder = ResponseStream(admitted.meta, lambda: int(time.time()))
        run = Run(lambda: msgspec.json.encode(encoder.snapshot))
        run.publish(encoder.queue())
        response = encoder.snapshot
        self.background.add(response.id, run)
        if not await self._remember(admitted, response):
            self.background.drop(response.id)
            raise unsupported(
                "background", "needs room for stored responses (history_bytes); there is none for this one"
            )
        self.background.start(response.id, lambda: self._run(run, admitted, encoder, record))
        return run

    async def _run(self, run: Run, admitted: Admitted, encoder: ResponseStream, record: Record) -> None:
        async def publish(events: list[wire.Event], choice: int) -> None:
            last = events[-1]
            if not isinstance(last, wire.Finish):
                run.publish(encoder.feed(events))
                return
            run.publish(encoder.feed(events[:-1]))
            await self._settle(admitted, encoder.end(last))
            run.publish(encoder.finish(last))

        failure: Failure | None = None
        try:
            await self._forward(admitted, publish, record)
            return
        except Refused as refused:
            failure = refused.failure
        except asyncio.CancelledError:
            record.end = "cancelled"
            if run.is_shutdown:
                failure = Failure(ErrorCode.SHUTTING_DOWN, STOPPED)
        except Exception as error:
            log.exception("request.bug")
            failure = Failure(ErrorCode.INTERNAL, f"a bug in the server: {type(error).__name__}")
        finally:
            record.write()
        await self._settle(admitted, encoder.stopped("failed" if failure else "cancelled", failure))
        run.publish(encoder.fail(failure) if failure else encoder.cancel())

    async def _settle(self, admitted: Admitted, response: Response) -> None:
        """Store the end of a response in the background."""
        if not await self._remember(admitted, response, over=True):
            failed = Failure(
                ErrorCode.DISK_FULL, "the response could not be stored; see history_bytes and the disk"
            )
            error = error_of(failed)
            await self._remember(
                admitted, replace(response, status="failed", error=error, output=[]), over=True
            )

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
        query = query_of(scope)
        *past, last = await self.history.expand(scope["path_params"]["id"])
        listed = stored.page([*stored.conversation(past), *stored.input_of(last)], query)
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
