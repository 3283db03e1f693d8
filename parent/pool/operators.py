"""What an operator may ask of the pool: load, unload, restart."""

import asyncio
import time
from typing import Literal

from parent.library.catalog import ModelEntry
from parent.pool.crew import forgive
from parent.pool.desk import FOREVER, Phase
from parent.pool.host import Host
from parent.pool.plan import hopeless
from parent.pool.pool import Pool
from parent.workers.states import State
from shared.errors import ErrorCode, Failure, Refused, refuse

MOST_DOOMED = 16  # sockets that are remembered; a request that was there asks again within a second
Mode = Literal["drain", "now", "if-idle"]


def load(pool: Pool, entry: ModelEntry, keep_alive_s: float | None = None) -> Host:
    """Load a model without a request, and do not wait for it. Raises `Refused` as a request would be."""
    lease = pool.ask(entry)
    if (never := hopeless(pool.desk, lease.host.slot)) is not None and lease.host.slot.phase is Phase.ABSENT:
        lease.release()
        raise Refused(never)
    configured = lease.host.keep_alive_s or FOREVER
    lease.host.slot.keep_alive_s = configured if keep_alive_s is None else keep_alive_s
    lease.host.slot.kept_since = time.monotonic()
    lease.release()
    return lease.host


def restart(pool: Pool, entry: ModelEntry) -> Host:
    """Drain and start again; from failed, exhausted or absent, start. Raises `Refused` (shutting_down)."""
    pool.check_open()
    host = pool.roster.host(entry)
    host.bad = None
    if host.slot.phase in (Phase.ABSENT, Phase.REFUSED):
        forgive(pool.desk, host, time.monotonic())
        host.slot.kept_since = time.monotonic()
        pool.replan()
    elif host.slot.phase is Phase.LEAVING:
        host.comes_back = True
    else:
        host.supervisor.restart()
    return host


def unload(pool: Pool, host: Host, mode: Mode) -> None:
    """`drain`: who is here is answered first, for at most `drain_s`. `now`: answers end with an error.

    `if-idle`: raises `Refused` (conflict) when there are any; so does a pinned model.
    """
    slot = host.slot
    busy = len(slot.waiting) + len(slot.granted)
    if mode == "if-idle" and busy:
        raise refuse(ErrorCode.CONFLICT, f"{slot.model} has {busy} requests; it was not unloaded")
    if slot.is_pinned:
        raise refuse(ErrorCode.CONFLICT, f"{slot.model} is pinned; take the pin away first")
    slot.kept_since, host.comes_back = None, False
    if host.supervisor.state in (State.FAILED, State.EXHAUSTED):
        host.supervisor.unwant()  # its failure is forgotten
    if mode == "now" and slot.phase in (Phase.LOADING, Phase.READY, Phase.LEAVING):
        _cut(pool, host)
    elif slot.phase in (Phase.LOADING, Phase.READY):
        pool.desk.unload(slot.model)
        drain_s = pool.settings.drain_s
        asyncio.get_running_loop().call_later(drain_s, _overdue, pool, host, slot.unload_from)
    pool.replan()


def _overdue(pool: Pool, host: Host, asked: int | None) -> None:
    """The drain has lasted long enough, where it still is the one that was asked for."""
    if asked is not None and host.slot.unload_from == asked:
        _cut(pool, host, before=asked)  # who came later waits for the next load
        pool.replan()


def _cut(pool: Pool, host: Host, before: float = FOREVER) -> None:
    failure = Failure(ErrorCode.UNLOADED, f"{host.entry.id} was unloaded by its operator", retry_after_s=1.0)
    while len(host.doomed) > MOST_DOOMED:
        del host.doomed[next(iter(host.doomed))]
    for supervisor in host.supervisors:
        host.doomed[supervisor.socket_path] = failure
        supervisor.stop()
    pool.deny_all(host.slot, failure, before=before)
