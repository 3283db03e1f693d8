"""One request, top to bottom: acquire a worker, stream its events, survive the loss of that worker.

A route sees only batches of events of one unbroken answer, however many workers gave it. What has been handed
out always matches the ids that are kept, so a request can go on exactly where it was.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from parent.inference.quarantine import Quarantine, request_hash
from parent.inference.record import Record
from parent.inference.states import Event, State, advance
from parent.library.adapters import Shelved
from parent.library.catalog import ModelEntry
from parent.pool.lease import Lease
from parent.pool.pool import Pool
from parent.workers.client import WorkerLost
from shared import logs, wire
from shared.errors import ErrorCode, Refused, refuse

log = logging.getLogger(__name__)
MAX_MISSES = 5
Emit = Callable[[list[wire.Event]], Awaitable[None]]


EmitChoice = Callable[[list[wire.Event], int], Awaitable[None]]
"""`Emit` of one of several answers, by its number."""
_LAST = (wire.Finish, wire.Failed)
_CONTENT = (wire.Text, wire.Reasoning, wire.ToolCall)
_OPENING = (wire.Started, wire.Prefill)


class Order(NamedTuple):
    """Whom a request is for, whose it is, how long it wants its model kept (None = as configured), and what it runs
    with.
    """

    entry: ModelEntry
    client: str = ""
    keep_alive_s: float | None = None
    adapters: tuple[Shelved, ...] = ()


class Forwarder:
    """What every request needs: the pool and the quarantine."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.quarantine = Quarantine()

    async def forward_all(
        self,
        order: Order,
        requests: list[wire.GenerateRequest],
        emit: EmitChoice,
        record: Record,
    ) -> None:
        """The same for each of `requests`, side by side; where one is refused all end.

        A request's place in the list is the choice that `emit` is told.
        """
        if len(requests) == 1:
            await self.forward(order, requests[0], _of(emit, 0), record)
            return
        records = record.split(len(requests))
        try:
            async with asyncio.TaskGroup() as group:
                for choice, request in enumerate(requests):
                    group.create_task(self.forward(order, request, _of(emit, choice), records[choice]))
        except* Refused as refused:
            raise first_of(refused) from None

    async def forward(self, order: Order, request: wire.GenerateRequest, emit: Emit, record: Record) -> None:
        """Hand the answer's events to `emit` in batches, never an empty one; the last event is `Finish`.

        `record` learns what happened. Raises `Refused` where there is no answer, or no more of it. Cancel it to
        cancel the request.
        """
        key = request_hash(request, order.entry.id)
        if self.quarantine.holds(key):
            raise refuse(
                ErrorCode.QUARANTINED,
                "this very request was in flight at two worker deaths and is refused; change it, or release it "
                f"with DELETE /admin/quarantine/{key.hex()}",
            )
        lease = self.pool.ask(order.entry, order.client, order.keep_alive_s)
        record.lease = lease
        try:
            with self.pool.mounts.using(lease.host, order.adapters):
                await self._run(lease, order, request, emit, record, key)
        finally:
            lease.release()

    async def _run(
        self,
        lease: Lease,
        order: Order,
        request: wire.GenerateRequest,
        emit: Emit,
        record: Record,
        key: bytes,
    ) -> None:
        state = advance(State.RECEIVED, Event.ACCEPT)
        kept = Kept()
        losses = misses = tries = 0  # losses: in a row, without new content
        known = 0  # ids at the last loss
        while True:
            client = await lease.grant()
            state = advance(state, Event.GRANT)
            in_line = False  # accepted by the worker, but not running yet: its death is not ours
            try:
                asked = request
                if tries:  # under an id of its own: the worker may not know yet that we left
                    again = f"{request.request_id}-{tries}"
                    asked = msgspec.structs.replace(request, request_id=again, resume=kept.ids)
                async with await self.pool.mounts.generate(
                    lease.host, client, order.adapters, asked
                ) as stream:
                    in_line = True
                    async for arrived in stream:
                        in_line = False
                        batch = kept.take(arrived)
                        if not batch:
                            continue
                        last = batch[-1]
                        if isinstance(last, wire.Failed):
                            if len(batch) > 1:
                                await emit(batch[:-1])
                            raise Refused(last.failure)
                        if state is State.GRANTED and kept.ids:
                            state = advance(state, Event.CONTENT)
                            record.first_token()
                        if losses and len(kept.ids) > known:  # it got past what may have been its fault
                            losses = 0
                            self.quarantine.survived(key)
                            lease.cleared()
                        if isinstance(last, wire.Finish):
                            self.quarantine.survived(key)
                            record.finished(last)
                        await emit(batch)
                return
            except WorkerLost as lost:
                tries += 1
                known = len(kept.ids)
                lease.is_suspect = lost.reached and not in_line
                if lease.is_suspect:
                    losses += 1
                    self.quarantine.death(key, client.socket_path, time.monotonic(), lease.host.entry.id)
                elif misses >= MAX_MISSES:
                    losses += 1
                else:
                    misses += 1  # it was gone before it ran the request: no loss of this request
                state = advance(state, Event.LOST, first_loss=losses < 2)
                logs.event(
                    log,
                    "request.lost_worker",
                    level=logging.WARNING,
                    losses=losses,
                    tokens=len(kept.ids),
                    next=state.value,
                    reason=str(lost),
                )
                if state is State.FAILED:
                    raise refuse(
                        ErrorCode.ENGINE_UNAVAILABLE,
                        "the worker died twice under this request; it is not tried again",
                        retry_after_s=None,
                    ) from lost
                kept.begin_again()
            finally:
                record.tokens = len(kept.ids)


class Kept:
    """The ids of what has been handed out, and the rule that both always match.

    A content event without ids belongs with the next one that has some, or with the end: it waits here.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._waiting: list[wire.Event] = []
        self._again = False

    def begin_again(self) -> None:
        """Another worker takes over: what waited comes again from it, and it starts with `Started` again."""
        self._waiting = []
        self._again = True

    def take(self, arrived: list[wire.Event]) -> list[wire.Event]:
        """What may leave now."""
        if len(arrived) == 1 and not self._waiting:  # nearly always
            only = arrived[0]
            if isinstance(only, _CONTENT) and only.ids:
                self.ids += only.ids
                return arrived
        if self._again:
            arrived = [event for event in arrived if not isinstance(event, _OPENING)]
        sure = 0
        for number, event in enumerate(arrived, 1):
            if isinstance(event, _CONTENT):
                if event.ids:
                    self.ids += event.ids
                    sure = number
            elif isinstance(event, _LAST) or sure == number - 1:
                sure = number
        if sure == len(arrived) and not self._waiting:
            return arrived
        if sure == 0:
            self._waiting += arrived
            return []
        batch = self._waiting + arrived[:sure]
        self._waiting = arrived[sure:]
        return batch


def _of(emit: EmitChoice, choice: int) -> Emit:
    return lambda events: emit(events, choice)


def first_of(group: BaseExceptionGroup[Refused]) -> Refused:
    """One of the exceptions of a group, however deep."""
    one: BaseException = group
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    assert isinstance(one, Refused)
    return one
