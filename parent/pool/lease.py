"""A request's hold on a model: from its arrival in the queue to its last byte, over the loss of workers too."""

import asyncio
import time
from typing import Protocol

from parent.config import Settings
from parent.pool.desk import Desk, Phase, Waiter
from parent.pool.host import Host
from parent.workers.client import WorkerClient
from parent.workers.states import State
from shared.errors import ErrorCode, Failure, Refused

DEATH_SHOWS_S = 1.0  # a death is seen on the data channel first, then on the control channel

UNKNOWN_LOAD_S = 5.0


class Keeper(Protocol):
    """What a lease needs of the pool that gave it."""

    settings: Settings
    desk: Desk
    is_closing: bool

    def requeue(self, lease: "Lease") -> None:
        """Its worker is lost."""

    def cleared(self, lease: "Lease") -> None:
        """It got further after a loss."""

    def left(self, lease: "Lease") -> None:
        """It has ended."""


class Lease:
    """Made by `Pool.ask`. `grant` waits for a worker; after a loss, `grant` again. Release it in every case."""

    def __init__(self, pool: Keeper, host: Host, waiter: Waiter) -> None:
        self.host = host
        self.waiter = waiter
        self.is_suspect = False  # of the last death: it was running there
        self._pool = pool
        self._client: WorkerClient | None = None
        self._answer: asyncio.Future[WorkerClient] = asyncio.get_running_loop().create_future()
        self._is_released = False

    async def grant(self) -> WorkerClient:
        """The worker to ask. Called again, the last one was lost.

        Raises `Refused`: loading (the wait bound is over), shutting_down, unloaded, cannot_fit, or what is wrong with
        the model.
        """
        if self._client is not None:
            await self._begin_again(self._client)
        try:
            async with asyncio.timeout(self._pool.settings.load_wait_s):
                self._client = await self._answer
        except TimeoutError:
            raise Refused(self._overdue()) from None
        return self._client

    async def _begin_again(self, lost: WorkerClient) -> None:
        if failure := self.host.doomed.get(lost.socket_path):
            raise Refused(failure)
        supervisor = self.host.supervisor
        if supervisor.client is lost:
            # The worker may be dead and we are first to know; or a connection was cut.
            await supervisor.changed(DEATH_SHOWS_S)
            if failure := self.host.doomed.get(lost.socket_path):
                raise Refused(failure)
        if self._pool.is_closing:
            raise Refused(Failure(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
        self._answer = asyncio.get_running_loop().create_future()
        self._pool.requeue(self)

    def cleared(self) -> None:
        """The request has got further than at its last loss; others that lost their worker may go on too."""
        self.is_suspect = False
        self._pool.cleared(self)

    def give(self, client: WorkerClient) -> None:
        """The pool's: there is a worker."""
        if not self._answer.done():
            self._answer.set_result(client)

    def deny(self, failure: Failure) -> None:
        """The pool's: there will be none."""
        if not self._answer.done():
            self._answer.set_exception(Refused(failure))

    def release(self) -> None:
        """The request has ended; twice does no harm."""
        if self._is_released:
            return
        self._is_released = True
        if self._answer.done() and not self._answer.cancelled():
            self._answer.exception()  # so that nobody says it was never looked at
        self._answer.cancel()
        self._pool.left(self)

    # ------------------------------------------------------------ for the one who waits

    def status(self) -> str:
        """What it waits for, in a few words; "" once it is granted."""
        slot, supervisor = self.host.slot, self.host.supervisor
        if self.waiter.is_granted:
            return ""
        place = sum(other.number <= self.waiter.number for other in slot.waiting)
        queue = f"place {place} of {len(slot.waiting)} for {slot.model}"
        if job := self._pool.desk.closed_for:
            return f"{queue}; {job} has the machine to itself"
        if slot.phase is Phase.READY:
            return queue
        if supervisor.state is State.LOADING:
            return f"{queue}; loading, {stage_of(self.host)}"
        if slot.phase is Phase.LOADING:
            return f"{queue}; {supervisor.state}"
        return f"{queue}; waits for memory"

    def _overdue(self) -> Failure:
        """503 with a guess at when it is worth asking again: what a load of this model costs."""
        pool, slot = self._pool, self.host.slot
        waited = time.monotonic() - self.waiter.since
        learned = max(slot.load_cost_s or UNKNOWN_LOAD_S, 1.0)
        return Failure(
            ErrorCode.LOADING,
            f"{slot.model} could not serve this within {waited:.1f} s ({self.status() or self.host.supervisor.state}); "
            f"{pool.desk.num_waiting} requests wait",
            retry_after_s=min(60.0, learned),
        )


def stage_of(host: Host) -> str:
    """How far a load is: `weights 40 %`."""
    progress = host.supervisor.progress
    share = f" {progress.done * 100 // progress.total} %" if progress.total else ""
    return f"{progress.stage or 'starting'}{share}"
