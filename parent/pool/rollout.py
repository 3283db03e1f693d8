"""Blue-green: other settings for a resident model. The new worker comes up beside the old where memory allows, else
after it; requests go to whichever is ready, and a new worker that fails leaves the old one serving.
"""

import logging
import time
from typing import TYPE_CHECKING

from parent.pool.desk import Phase
from parent.pool.estimate import bill_of
from parent.pool.host import Host
from parent.pool.refusal import refusal
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared.logs import event

if TYPE_CHECKING:
    from parent.pool.pool import Pool

log = logging.getLogger(__name__)


def begin(pool: "Pool", host: Host) -> None:
    """Replace the worker of `host` where it was started by another recipe than the settings now say."""
    slot = host.slot
    if host.recipe == host.running:
        return
    if slot.phase is Phase.LOADING and host.good is None:
        host.comes_back = True  # a load by the old recipe: stop it, begin again
        host.supervisor.unwant()
        return
    if slot.phase is not Phase.READY or host.successor is not None:
        return  # absent: the next load takes the new one; rolling: looked at again at its end
    bill = bill_of(host.entry, host.recipe.launch, pool.device)
    ledger, limit = pool.desk.ledger, pool.settings.max_resident
    if bill.least > ledger.free or (limit and ledger.count("model") >= limit):
        event(log, "model.rollout", model=slot.model, how="drain, then start")
        pool.desk.unload(slot.model)
        host.comes_back = True
        return
    event(log, "model.rollout", model=slot.model, how="beside")
    slot.is_rolling = True
    successor = host.successor = pool.make_supervisor(host.recipe.launch)
    pool.belongs(successor, host)
    grant = bill.grant(bill.least + max(0, ledger.free - bill.least) // 2)
    ledger.reserve(successor.name, grant.total, grant=grant)
    host.prepare(successor, grant)
    successor.want()


def moved(pool: "Pool", host: Host, successor: Supervisor) -> None:
    """The successor's state has changed: take over, or give up."""
    if successor.state is State.READY:
        old = host.supervisor
        host.supervisor, host.successor = successor, None
        host.slot.account, host.slot.is_rolling = successor.name, False
        host.good, host.rollout = host.running, ""
        host.leaving.append(old)
        pool.settle(host, successor)
        pool.desk.moved(host.slot.model, Phase.READY, time.monotonic())
        host.slot.room = successor.launch.max_rows
        old.unwant()
        event(log, "model.switched", model=host.slot.model, worker=successor.name)
        begin(pool, host)  # the settings may have changed again meanwhile
    elif successor.state in (State.BACKOFF, State.FAILED, State.EXHAUSTED):
        failure = refusal(successor) or successor.life.failure
        _failed(host, failure.message if failure else "its worker did not become ready")
        host.bad, host.running = host.running, host.good or host.running
        host.recipe = host.running
        host.slot.is_rolling = False
        host.successor = None
        host.leaving.append(successor)
        successor.unwant()


def go_back(pool: "Pool", host: Host) -> bool:
    """The worker of the new recipe cannot be had: begin again with the last good one. False = there is none."""
    good = host.good
    if good is None or good == host.running:
        return False
    failure = refusal(host.supervisor)
    _failed(host, failure.message if failure else "its worker did not become ready")
    host.bad, host.recipe = host.running, good
    host.slot.bill = bill_of(host.entry, good.launch, pool.device)
    pool.forgive(host)
    host.slot.kept_since = time.monotonic()
    return True


def _failed(host: Host, why: str) -> None:
    host.rollout = f"the new settings were not taken, the old ones serve on: {why}"
    event(log, "model.rollout_failed", level=logging.WARNING, model=host.slot.model, reason=why)
