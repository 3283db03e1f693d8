"""Blue-green: other settings for a resident model. The new worker comes up beside the old where memory allows, else
after it; requests go to whichever is ready, and a new worker that fails leaves the old one serving.
"""

import logging
import time

from msgspec.structs import replace

from parent.library.machine import Device
from parent.pool.crew import Crew, forgive
from parent.pool.desk import Desk, Phase
from parent.pool.estimate import bill_of
from parent.pool.host import Host
from parent.pool.refusal import refusal
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared.logs import event

log = logging.getLogger(__name__)


def begin(crew: Crew, desk: Desk, host: Host, device: Device) -> None:
    """Replace the worker of `host` where it was started by another recipe than the settings now say."""
    slot, ledger, limit = host.slot, desk.ledger, desk.policy.max_resident
    if host.recipe == host.running:
        return
    if slot.phase is Phase.LOADING:
        host.comes_back = True  # a load by the old recipe: stop it, begin again
        host.supervisor.unwant()
        return
    if slot.phase is not Phase.READY or host.successor is not None:
        return  # absent: the next load takes the new one; rolling: looked at again at its end
    bill = replace(bill_of(host.entry, host.recipe.launch, device), adapters=host.adapter_bytes)
    if bill.least > ledger.free or (limit and ledger.count("model") >= limit):
        event(log, "model.rollout", model=slot.model, how="drain, then start")
        host.comes_back = True
        host.supervisor.unwant()  # what still runs when the drain is over goes on with the new worker
        return
    event(log, "model.rollout", model=slot.model, how="beside")
    slot.is_rolling = True
    successor = host.successor = crew.make(host.recipe.launch)
    crew.hosts[successor] = host
    grant = bill.grant(bill.least + (ledger.free - bill.least) // 2)
    ledger.reserve(successor.name, grant.total, grant=grant)
    host.prepare(successor, grant)
    successor.want()


def moved(crew: Crew, desk: Desk, host: Host, device: Device) -> None:
    """The successor's state has changed: take over, or give up."""
    successor = host.successor
    assert successor is not None
    if successor.state is State.READY:
        _switch(crew, desk, host, successor)
        begin(crew, desk, host, device)  # the settings may have changed again meanwhile
    elif successor.state in (State.BACKOFF, State.FAILED, State.EXHAUSTED):
        host.bad = host.running
        host.recipe = host.good or host.running
        _note_failure(host, successor)
        _give_up(host, successor)
        successor.unwant()
    elif successor.state is State.ABSENT:  # stopped by an operator
        _give_up(host, successor)
        crew.dismiss(successor)


def _give_up(host: Host, successor: Supervisor) -> None:
    host.running = host.good or host.running
    host.slot.is_rolling, host.successor = False, None
    host.leaving.append(successor)


def _switch(crew: Crew, desk: Desk, host: Host, successor: Supervisor) -> None:
    old = host.supervisor
    host.supervisor, host.successor = successor, None
    host.slot.account, host.slot.is_rolling = successor.name, False
    host.good, host.rollout = host.running, ""
    host.leaving.append(old)
    crew.settle(host, successor)
    desk.moved(host.slot.model, Phase.READY, time.monotonic())
    host.slot.room = successor.launch.max_rows
    old.unwant()
    event(log, "model.switched", model=host.slot.model, worker=successor.name)


def go_back(desk: Desk, host: Host, device: Device) -> bool:
    """The worker of the new recipe cannot be had: begin again with the last good one. False = there is none."""
    good = host.good
    if good is None or good == host.running or good.signature != host.running.signature:
        return False  # other files, too, do not come back by another recipe
    _note_failure(host, host.supervisor)
    host.bad, host.recipe = host.running, good
    host.slot.bill = replace(bill_of(host.entry, good.launch, device), adapters=host.adapter_bytes)
    forgive(desk, host, time.monotonic())
    host.slot.kept_since = time.monotonic()
    return True


def _note_failure(host: Host, supervisor: Supervisor) -> None:
    failure = refusal(supervisor) or supervisor.life.failure
    why = failure.message if failure else "its worker did not become ready"
    host.rollout = f"the new settings were not taken, the old ones serve on: {why}"
    event(log, "model.rollout_failed", level=logging.WARNING, model=host.slot.model, reason=why)
