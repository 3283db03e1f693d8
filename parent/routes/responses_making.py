"""How a response comes to be: whole, as a stream, or in the background; and how it is stored.

It is stored when it is whole, before its last frame leaves, so that a client that has seen the end can follow on at
once. What fails or is cancelled is no answer: only a response in the background leaves a trace of it.
"""

import asyncio
import logging
import time

import msgspec
from msgspec.structs import replace

from parent.inference.background import STOPPED, Background, Run
from parent.inference.forward import Forwarder
from parent.inference.history import History
from parent.inference.record import Record
from parent.inference.reply import Emit, send_stream
from parent.protocols.base import Answer
from parent.protocols.refusing import unsupported
from parent.protocols.responses import decode as responses
from parent.protocols.responses import items as responses_items
from parent.protocols.responses import stored
from parent.protocols.responses.object import Response, error_of, whole
from parent.protocols.responses.request import asked_of
from parent.protocols.responses.stream import ResponseStream
from parent.routes.inference import Admitted, forwarded
from shared import asgi, wire
from shared.errors import ErrorCode, Failure, Refused
from shared.logs import event

log = logging.getLogger(__name__)
SHORTER = 4  # so often is a prompt that is too long made shorter


class Maker:
    """Makes the responses of requests that are admitted."""

    def __init__(self, forwarder: Forwarder, history: History, background: Background) -> None:
        self.forwarder = forwarder
        self.history = history
        self.background = background

    async def whole(self, receive: asgi.Receive, send: asgi.Send, admitted: Admitted, record: Record) -> None:
        """As one JSON body. Raises `Refused` where there is no answer."""
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

    async def stream(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        admitted: Admitted,
        record: Record,
    ) -> None:
        """As server-sent events."""
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

    async def start(self, admitted: Admitted, record: Record) -> Run:
        """Store it as queued, and begin. Raises `Refused` where it cannot be stored."""
        encoder = ResponseStream(admitted.meta, lambda: int(time.time()))
        run = Run(lambda: msgspec.json.encode(encoder.snapshot))
        run.publish(encoder.queue())
        response = encoder.snapshot
        self.background.add(response.id, run)
        is_stored = False
        try:
            is_stored = await self._remember(admitted, response)
        finally:
            if not is_stored:
                self.background.drop(response.id)
        if not is_stored:
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
