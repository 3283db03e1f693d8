"""The owner of all workers. Every event goes into the books, `plan` decides, and here it is made so.

Everything runs on the event loop, in one place and one order: `_replan` is called at every event, and no other code
starts, stops or grants. Requests hold a `Lease` from their arrival to their last byte.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.library.machine import Device
from parent.library.names import Found, Names
from parent.model_options import ModelOptions
from parent.pool import rollout
from parent.pool.desk import FOREVER, Desk, Phase, Policy
from parent.pool.estimate import Recipe, bill_of
from parent.pool.host import Host, phase_of, recipe_of
from parent.pool.lease import Lease
from parent.pool.ledger import Grant, Ledger
from parent.pool.models import Choice, choose
from parent.pool.plan import Action, Deny, Evict, Give, Load, Resize, plan
from parent.pool.refusal import refusal
from parent.workers import launcher, runtime_file
from parent.workers.memory import Memory, SystemMemory
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import Limits, State
from parent.workers.supervisor import Supervisor
from shared.control import LaunchModel
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.logs import event
from shared.units import format_bytes

log = logging.getLogger(__name__)
MEASURE_S = 1.0


class Pool:
    """All models. `on_change` is told whenever a worker's state or progress moves."""

    def __init__(
        self,
        library: Library,
        settings: Settings,
        device: Device,
        *,
        runtime_dir: Path,
        default: str = "",
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
        memory: Memory | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.library = library
        self.settings = settings
        self.device = device
        self.default = default  # id of what serves a request that names no model, and is loaded at start
        self.is_closing = False
        self.hosts: dict[str, Host] = {}
        self.desk = Desk(Ledger(settings.memory_budget_bytes or device.budget_bytes), policy_of(settings))
        self._runtime_dir = runtime_dir
        self._command = worker_command or launcher.default_command()
        self._environment = launcher.worker_environment(worker_env or {})
        self._memory = memory or SystemMemory()
        self._on_change = on_change
        self._numbers = iter(range(1 << 30))
        self._taken: set[str] = set()  # names of workers that an earlier parent left
        self._hosts_of: dict[Supervisor, Host] = {}
        self._seen: dict[Supervisor, State] = {}
        self._leases: dict[int, Lease] = {}
        self._planning = self._again = False
        self._timer: asyncio.TimerHandle | None = None
        self._measuring: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ start

    async def start(self, leftovers: list[RuntimeRecord]) -> list[RuntimeRecord]:
        """Adopt what an earlier parent left; load the default model and the pinned ones, without waiting.

        Returns the records that were adopted.
        """
        self._taken = {record.name for record in leftovers}
        adopted = [record for record in leftovers if await self._adopt(record)]
        for entry in self.library.entries:
            if self.library.options(entry.id).pin and not entry.error:
                self.host(entry)
        if self.default:
            self.host(self.library.resolve(self.default).entry).slot.kept_since = time.monotonic()
        self._measuring = asyncio.get_running_loop().create_task(self._measure())
        self.replan()
        return adopted

    async def _adopt(self, record: RuntimeRecord) -> bool:
        try:
            entry = self.library.resolve(record.launch.model_id).entry
        except Refused:
            return False
        host = self.host(entry)
        if host.supervisor.state is not State.ABSENT or entry.error:
            return False
        bytes_granted = Grant(record.footprint, 0, record.launch.kv_bytes, record.launch.prefix_cache_bytes)
        if not await host.supervisor.adopt(record):
            return False
        host.slot.account = host.supervisor.name
        self.desk.ledger.adopt(host.slot.account, bytes_granted.total, record.footprint, bytes_granted)
        caps = {"kv_bytes": host.recipe.launch.kv_bytes, "nonce": ""}
        told = replace(record.launch, **caps, prefix_cache_bytes=host.recipe.launch.prefix_cache_bytes)
        host.running = host.good = replace(host.recipe, launch=told, command=tuple(record.command))
        self._worker_moved(host.supervisor)
        rollout.begin(self, host)
        return True

    # ------------------------------------------------------------ models

    def host(self, entry: ModelEntry) -> Host:
        """The host of a model, made on first use and brought up to date."""
        options = self.library.options(entry.id)
        recipe = self._recipe(entry, options, self.settings)
        host = self.hosts.get(entry.id)
        if host is None:
            slot = self.desk.slot(entry.id)
            host = Host(entry, slot, recipe, self.make_supervisor(recipe.launch))
            slot.account = host.supervisor.name
            self.hosts[entry.id] = self._hosts_of[host.supervisor] = host
        elif host.entry is entry and host.options is options and host.recipe == recipe:
            return host
        if recipe == host.bad and host.good is not None:
            recipe = host.good
        was_replaced = host.recipe.signature != recipe.signature
        host.entry, host.options, host.recipe = entry, options, recipe
        slot = host.slot
        slot.bill = bill_of(entry, recipe.launch, self.device)
        slot.is_pinned = options.pin
        keep = self.settings.keep_alive_s if options.keep_alive is None else options.keep_alive
        slot.keep_alive_s = keep or FOREVER
        if slot.phase is Phase.REFUSED and was_replaced:
            self.forgive(host)  # what failed was another model
        return host

    def _recipe(self, entry: ModelEntry, options: ModelOptions, settings: Settings) -> Recipe:
        folder = hashlib.blake2b(str(entry.path).encode(), digest_size=12).hexdigest()
        spill = settings.data_dir / "cache" / "kv" / folder
        return recipe_of(entry, options, settings, self._command, str(spill))

    def make_supervisor(self, launch: LaunchModel) -> Supervisor:
        """A supervisor with a name of its own; whose it is has to be said with `belongs`."""
        name = next(name for number in self._numbers if (name := f"w{number}") not in self._taken)
        settings = self.settings
        limits = Limits(
            hello_s=settings.hello_s,
            load_stall_s=settings.load_stall_s,
            load_total_s=settings.load_total_s,
            drain_s=settings.drain_s,
            stop_grace_s=settings.stop_grace_s,
            reclaim_s=settings.reclaim_s,
            half_open_s=settings.half_open_s,
            restart_budget=settings.restart_budget,
            restart_window_s=settings.restart_window_s,
        )
        supervisor = Supervisor(
            launch,
            command=self._command,
            environment=self._environment,
            runtime_dir=self._runtime_dir,
            limits=limits,
            heartbeat_s=settings.heartbeat_s,
            hung_s=settings.hung_s,
            name=name,
            memory=self._memory,
            beside=lambda: self._measured_beside(name),
            on_change=lambda: self._worker_moved(supervisor),
        )
        return supervisor

    def belongs(self, supervisor: Supervisor, host: Host) -> None:
        """From now on the supervisor's changes are this host's."""
        self._hosts_of[supervisor] = host

    def _measured_beside(self, name: str) -> int:
        accounts = self.desk.ledger.accounts.copy()
        return sum(account.measured for other, account in accounts.items() if other != name)

    def refresh(self) -> None:
        """The library or the settings have changed: bring every host up to date, replace workers that need it."""
        self.desk.policy = policy_of(self.settings)
        self.desk.ledger.budget = self.settings.memory_budget_bytes or self.device.budget_bytes
        known = {entry.id: entry for entry in self.library.entries}
        for entry in known.values():
            if entry.id in self.hosts or (self.library.options(entry.id).pin and not entry.error):
                self.host(entry)
        for host in list(self.hosts.values()):
            if host.entry.id not in known:
                host.slot.is_pinned = (
                    False  # removed on disk: what is in memory serves on until it has to leave
                )
                host.slot.kept_since = None
            else:
                rollout.begin(self, host)
        self.replan()

    def check_pins(self, settings: Settings, options: dict[str, ModelOptions]) -> None:
        """Raises `Refused` (cannot_fit) with the numbers when the models pinned there are more than the budget."""
        entries = self.library.entries
        told = Names(entries, options).options_of
        pinned = {
            entry.id: bill_of(entry, self._recipe(entry, told[entry.id], settings).launch, self.device).least
            for entry in entries
            if entry.id in told and told[entry.id].pin and not entry.error
        }
        budget = settings.memory_budget_bytes or self.device.budget_bytes
        usable, limit = budget - self.desk.ledger.leaked, settings.max_resident
        if sum(pinned.values()) > usable:
            each = ", ".join(f"{model} {format_bytes(size)}" for model, size in pinned.items())
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"the pinned models need {format_bytes(sum(pinned.values()))} ({each}) and the budget is "
                f"{format_bytes(max(0, usable))}; pin fewer, or raise memory_budget_bytes",
            )
        if limit and len(pinned) > limit:
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"{len(pinned)} models are pinned and max_resident is {limit}; pin fewer",
            )

    # ------------------------------------------------------------ requests

    async def look(self) -> None:
        """Look at the disk for new, changed and removed models."""
        if await self.library.refresh():
            self.refresh()
            self._on_change()

    async def known(self, name: str) -> Found:
        """The model of a name, after a look at the disk where it is unknown. Raises `Refused` (model_not_found)."""
        try:
            return self.library.resolve(name)
        except Refused as refused:
            if refused.failure.code is not ErrorCode.MODEL_NOT_FOUND:
                raise
        await self.look()
        return self.library.resolve(name)

    async def choose(self, name: str) -> Choice:
        """The model of a request: `find`, with the disk looked at before a name counts as unknown."""
        if name:
            with contextlib.suppress(Refused):
                found = await self.known(name)
                return Choice(found.entry, found.profile)
        return self.find(name)

    def find(self, name: str) -> Choice:
        """A client's name to a model. Raises `Refused` (model_not_found)."""
        ready = [host for host in self.hosts.values() if host.slot.phase is Phase.READY]
        ready.sort(key=lambda host: -host.slot.last_used)
        return choose(
            name,
            self.library.resolve,
            default=self.default,
            fallback=self.settings.fallback,
            residents=[host.entry for host in ready],
        )

    def ask(self, entry: ModelEntry, client: str = "", keep_alive_s: float | None = None) -> Lease:
        """A place in the queue of a model. Release it in every case.

        Raises `Refused`: shutting_down, queue_full, bad_checkpoint, unsupported, engine_unavailable (the reason).
        """
        if self.is_closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        self._check_queue(client)
        host = self.host(entry)
        slot = host.slot
        if entry.error and slot.phase in (Phase.ABSENT, Phase.REFUSED):
            code = ErrorCode.UNSUPPORTED if entry.unsupported else ErrorCode.BAD_CHECKPOINT
            raise refuse(code, f"{entry.id} cannot be served: {entry.error}", param="model")
        if slot.phase is Phase.REFUSED:
            failure = refusal(host.supervisor)
            if failure is not None and not self._may_try_again(host):
                raise Refused(failure)
            self.desk.moved(slot.model, Phase.ABSENT, time.monotonic())
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        lease = Lease(self, host, self.desk.ask(slot.model, client, time.monotonic()))
        self._leases[id(lease.waiter)] = lease
        self.replan()
        return lease

    def _check_queue(self, client: str) -> None:
        """A full queue still takes the first request of a client that has none in it, up to twice the limit."""
        waiting, limit = self.desk.num_waiting, self.settings.queue_limit
        if waiting < limit:
            return
        others = waiting < 2 * limit and all(
            waiter.client != client for slot in self.desk.slots.values() for waiter in slot.waiting
        )
        if not others:
            raise refuse(
                ErrorCode.QUEUE_FULL,
                f"{waiting} requests wait already; the limit is {limit} (setting queue_limit)",
                retry_after_s=1.0,
            )

    @staticmethod
    def _may_try_again(host: Host) -> bool:
        life = host.supervisor.life
        return life.state is State.EXHAUSTED and time.monotonic() >= life.half_open_at

    def requeue(self, lease: Lease) -> None:
        """The lease's worker is lost."""
        self.desk.requeue(lease.waiter, time.monotonic())
        self.replan()

    def left(self, lease: Lease) -> None:
        """The request has ended."""
        self._leases.pop(id(lease.waiter), None)
        self.desk.leave(lease.waiter, time.monotonic())
        self.replan()

    def outstanding(self, model_id: str) -> int:
        """Requests of a model that wait or run."""
        slot = self.desk.slots.get(model_id)
        return len(slot.waiting) + len(slot.granted) if slot else 0

    @property
    def num_outstanding(self) -> int:
        return len(self._leases)

    # ------------------------------------------------------------ decisions

    def replan(self) -> None:
        """Something has happened: decide, and do it. Called again from within, it goes round once more."""
        if self._planning:
            self._again = True
            return
        if self.is_closing:
            return
        self._planning = True
        look_at = FOREVER
        try:
            self._again = True
            while self._again:
                self._again = False
                actions, look_at = plan(self.desk, time.monotonic())
                for action in actions:
                    try:
                        self._perform(action)
                    except Exception:  # a bug of one model's must not stop the others
                        log.exception("pool.bug")
        finally:
            self._planning = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if look_at != FOREVER:
            delay = max(0.0, look_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.replan)

    def _perform(self, action: Action) -> None:
        match action:
            case Give(waiter):
                client = self.hosts[waiter.model].supervisor.client
                assert client is not None  # the planner knows it as ready
                self._leases[id(waiter)].give(client)
            case Deny(waiter, failure):
                self._leases[id(waiter)].deny(failure)
            case Load(model, grant):
                self._load(self.hosts[model], grant)
            case Resize(model, grant):
                event(log, "model.resized", model=model, kv=grant.kv, prefix=grant.prefix)
                self.hosts[model].supervisor.resize(grant.kv, grant.prefix)
            case Evict(model, why):
                event(log, "model.evicted", model=model, why=why, held=self._held(model))
                self.hosts[model].supervisor.unwant()

    def _load(self, host: Host, grant: Grant) -> None:
        event(log, "model.load", model=host.entry.id, bytes=grant.total, free=self.desk.ledger.free)
        host.prepare(host.supervisor, grant)
        afresh, host.starts_afresh = host.starts_afresh, False
        if afresh:
            host.supervisor.restart()
        else:
            host.supervisor.want()

    def _held(self, model: str) -> int:
        return self.desk.ledger.held_by(self.desk.slots[model].account)

    # ------------------------------------------------------------ events of workers

    def _worker_moved(self, supervisor: Supervisor) -> None:
        host = self._hosts_of[supervisor]
        if self._seen.get(supervisor) is not supervisor.state:
            self._seen[supervisor] = supervisor.state
            if supervisor is host.supervisor:
                self._served_moved(host)
            elif supervisor is host.successor:
                rollout.moved(self, host, supervisor)
            elif supervisor.state is State.ABSENT:
                self._gone(host, supervisor)
            self._write_runtime_file()
            self.replan()
        self._on_change()

    def _gone(self, host: Host, supervisor: Supervisor) -> None:
        """One that was replaced, or did not make it, has left."""
        host.leaving.remove(supervisor)
        self.close_account(supervisor)
        del self._hosts_of[supervisor], self._seen[supervisor]

    def _served_moved(self, host: Host) -> None:
        supervisor, slot, now = host.supervisor, host.slot, time.monotonic()
        phase = phase_of(supervisor)
        if phase is Phase.READY and slot.phase is not Phase.READY:
            self.settle(host, supervisor)
            host.good = host.running
        if phase in (Phase.ABSENT, Phase.REFUSED):
            self.close_account(supervisor)
        self.desk.moved(slot.model, phase, now)
        if phase is Phase.READY:
            slot.room = supervisor.launch.max_rows
        elif phase is Phase.ABSENT and host.comes_back:
            host.comes_back = False
            slot.kept_since = now
        elif phase is Phase.REFUSED and not rollout.go_back(self, host):
            slot.kept_since = None
            self._deny_all(host)

    def _deny_all(self, host: Host) -> None:
        failure = refusal(host.supervisor)
        if failure is None:
            return
        for waiter in list(host.slot.waiting):
            self.desk.leave(waiter, time.monotonic())
            self._leases[id(waiter)].deny(failure)

    def settle(self, host: Host, supervisor: Supervisor) -> None:
        """A worker is loaded: what it holds and what it cost are known now."""
        weights = supervisor.facts.weights_bytes if supervisor.facts else 0
        self.desk.ledger.settle(supervisor.name, weights)
        if supervisor.load_s:
            self.desk.learn(host.slot.model, supervisor.load_s)

    def close_account(self, supervisor: Supervisor) -> None:
        """Its process has gone; what it did not give back is booked as leaked."""
        missing = supervisor.missing_bytes
        if missing:
            event(log, "ledger.leaked", level=logging.WARNING, worker=supervisor.name, bytes=missing)
        self.desk.ledger.release(supervisor.name, missing)

    def forgive(self, host: Host) -> None:
        """Earlier failures of this model do not count any more."""
        host.starts_afresh = True
        self.desk.moved(host.slot.model, Phase.ABSENT, time.monotonic())

    async def _measure(self) -> None:
        """Once a second: what the workers hold, and whether missing memory has come back."""
        while True:
            await asyncio.sleep(MEASURE_S)
            ledger = self.desk.ledger
            free = ledger.free
            for supervisor in self.supervisors():
                ledger.measure(supervisor.name, supervisor.footprint_bytes)
                if supervisor.name in ledger.missing:
                    ledger.recover(supervisor.name, supervisor.missing_now())
            if ledger.free != free:
                self.replan()

    # ------------------------------------------------------------ operators

    def restart(self, entry: ModelEntry) -> Host:
        """Drain and start again; from failed, exhausted or absent, start. Raises `Refused`."""
        self._check_open()
        host = self.host(entry)
        host.bad = None
        if host.slot.phase in (Phase.ABSENT, Phase.REFUSED):
            self.forgive(host)
            host.slot.kept_since = time.monotonic()
            self.replan()
        elif host.slot.phase is not Phase.LEAVING:
            host.supervisor.restart()
        return host

    def load(self, entry: ModelEntry, keep_alive_s: float | None = None) -> Host:
        """Load a model without a request. Raises `Refused`."""
        self._check_open()
        lease = self.ask(entry, keep_alive_s=keep_alive_s)  # for its refusals
        host = lease.host
        host.slot.kept_since = time.monotonic()
        lease.release()
        return host

    def unload(self, host: Host, mode: str) -> None:
        """`drain`: who is here is answered first, for at most `drain_s`. `now`: answers end with an error.

        `if-idle`: raises `Refused` (conflict) when there are any.
        """
        slot = host.slot
        busy = len(slot.waiting) + len(slot.granted)
        if mode == "if-idle" and busy:
            raise refuse(ErrorCode.CONFLICT, f"{slot.model} has {busy} requests; it was not unloaded")
        if slot.is_pinned:
            raise refuse(ErrorCode.CONFLICT, f"{slot.model} is pinned; take the pin away first")
        slot.kept_since, host.comes_back = None, False
        if slot.phase not in (Phase.LOADING, Phase.READY):
            return
        if mode == "now":
            self._unload_now(host)
        else:
            self.desk.unload(slot.model)
            asyncio.get_running_loop().call_later(
                self.settings.drain_s, self._unload_overdue, host, slot.unload_from
            )
        self.replan()

    def _unload_overdue(self, host: Host, asked: int | None) -> None:
        if asked is not None and host.slot.unload_from == asked:
            self._unload_now(host)
            self.replan()

    def _unload_now(self, host: Host) -> None:
        failure = Failure(
            ErrorCode.UNLOADED, f"{host.entry.id} was unloaded by its operator", retry_after_s=1.0
        )
        for supervisor in host.supervisors:
            host.doomed[supervisor.socket_path] = failure
            supervisor.stop()
        for waiter in list(host.slot.waiting):
            self.desk.leave(waiter, time.monotonic())
            self._leases[id(waiter)].deny(failure)

    def _check_open(self) -> None:
        if self.is_closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")

    # ------------------------------------------------------------ shutdown

    def supervisors(self) -> list[Supervisor]:
        return [supervisor for host in self.hosts.values() for supervisor in host.supervisors]

    def close(self) -> None:
        """Grant nothing any more; those who wait are answered now. Requests that run go on."""
        self.is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._measuring is not None:
            self._measuring.cancel()
        failure = Failure(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        for slot in self.desk.slots.values():
            for waiter in list(slot.waiting):
                self.desk.leave(waiter, time.monotonic())
                self._leases[id(waiter)].deny(failure)

    def cut(self) -> None:
        """Stop every worker now; requests that still run end with an error frame."""
        self.close()
        for supervisor in self.supervisors():
            supervisor.stop()

    async def stop(self) -> None:
        """End every worker: shutdown, TERM, KILL. Returns when no process is left."""
        self.cut()
        for supervisor in self.supervisors():
            await supervisor.absent()

    def kill(self) -> None:
        """SIGKILL every worker now; `stop` then returns at once."""
        self.close()
        for supervisor in self.supervisors():
            supervisor.kill()

    def records(self) -> Iterator[RuntimeRecord]:
        """What a later parent needs to adopt the workers."""
        for supervisor in self.supervisors():
            record = supervisor.record()
            if record is not None:
                yield record

    def _write_runtime_file(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # a full disk: a later parent will load again, nothing else is lost
            runtime_file.write(self._runtime_dir / runtime_file.NAME, list(self.records()))


def policy_of(settings: Settings) -> Policy:
    """The planner's numbers."""
    return Policy(**{name: getattr(settings, name) for name in Policy.__struct_fields__})
