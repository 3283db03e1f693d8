"""The owner of all workers. Every event goes into the books, `plan` decides, and here it is made so.

Everything runs on the event loop, in one place and one order: `replan` is called at every event, and nothing else
starts, stops or grants. Requests hold a `Lease` from their arrival to their last byte.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.library.machine import Device
from parent.pool import rollout
from parent.pool.berths import Berths
from parent.pool.crew import Crew, forgive
from parent.pool.desk import FOREVER, Desk, Phase, Policy, Slot
from parent.pool.host import Host, phase_of
from parent.pool.lease import Lease
from parent.pool.ledger import Grant, Ledger
from parent.pool.mounts import MountPoint
from parent.pool.plan import Action, Deny, Displace, Evict, Give, Load, Place, Resize, plan
from parent.pool.refusal import refusal
from parent.pool.roster import Roster
from parent.workers.memory import Memory
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.logs import event

log = logging.getLogger(__name__)
MEASURE_S = 1.0


class Pool:
    """All models. See `Roster` for `default`.

    `on_change` is told whenever a worker's state or progress moves, `on_queue` when requests come, go, or are granted.
    """

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
        on_queue: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.is_closing = False
        self.desk = Desk(Ledger(settings.memory_budget_bytes or device.budget_bytes), policy_of(settings))
        self.crew = Crew(
            self.desk,
            settings,
            runtime_dir=runtime_dir,
            on_change=self._worker_moved,
            command=worker_command,
            environment=worker_env,
            memory=memory,
        )
        self.roster = Roster(library, self.desk, self.crew, device, settings, default)
        self.mounts = MountPoint(self.desk)
        self.berths = Berths(self.desk, self.replan)
        self._on_change, self._on_queue = on_change, on_queue
        self._seen: dict[Supervisor, State] = {}
        self._leases: dict[int, Lease] = {}
        self._planning = self._again = False
        self._timer: asyncio.TimerHandle | None = None
        self._measuring: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ start, and changes from outside

    async def start(self, leftovers: list[RuntimeRecord]) -> list[RuntimeRecord]:
        """Adopt what an earlier parent left; load the default model and the pinned ones, without waiting.

        Returns the records that were adopted.
        """
        self.crew.avoid(record.name for record in leftovers)
        adopted = [record for record in leftovers if await self._adopt(record)]
        for entry in self.roster.pinned():
            self.roster.host(entry)
        if self.roster.default:
            entry = self.roster.library.resolve(self.roster.default).entry
            if not entry.error:
                self.roster.host(entry).slot.kept_since = time.monotonic()
        self._measuring = asyncio.get_running_loop().create_task(self._measure())
        self.replan()
        return adopted

    async def _adopt(self, record: RuntimeRecord) -> bool:
        try:
            entry = self.roster.library.resolve(record.launch.model_id).entry
        except Refused:
            return False
        host = self.roster.host(entry)
        if entry.error or host.supervisor.state is not State.ABSENT:
            return False
        launch, wished, own = record.launch, host.recipe.launch, host.slot.account
        told = replace(
            launch, nonce="", kv_bytes=wished.kv_bytes, prefix_cache_bytes=wished.prefix_cache_bytes
        )
        grant = Grant(record.footprint, 0, launch.kv_bytes, launch.prefix_cache_bytes)
        host.slot.account = record.name  # from now on, as it is the supervisor's name once it adopts
        self.desk.ledger.adopt(record.name, grant.total, record.footprint, grant)
        host.running = replace(host.recipe, launch=told, command=tuple(record.command))
        if await host.supervisor.adopt(record):
            return True
        self.desk.ledger.release(record.name)
        host.slot.account, host.running = own, host.recipe
        return False

    def take_settings(self, settings: Settings) -> None:
        """The settings, or what they say of single models, are these now."""
        self.settings = self.roster.settings = settings
        self.crew.take_settings(settings)
        self.desk.policy = policy_of(settings)
        self.desk.ledger.budget = settings.memory_budget_bytes or self.device.budget_bytes
        self.roster.refresh()
        self.replan()

    async def look(self) -> None:
        """Look at the disk for new, changed and removed models."""
        if await self.roster.look():
            self.replan()
            self._on_change()

    # ------------------------------------------------------------ requests

    def ask(self, entry: ModelEntry, client: str = "", keep_alive_s: float | None = None) -> Lease:
        """A place in the queue of a model. Release it in every case.

        Raises `Refused`: shutting_down, queue_full, bad_checkpoint, unsupported, engine_unavailable (the reason).
        """
        self.check_open()
        self._check_queue(client)
        host = self.roster.host(entry)
        slot = host.slot
        if entry.error and slot.phase in (Phase.ABSENT, Phase.REFUSED):
            code = ErrorCode.UNSUPPORTED if entry.unsupported else ErrorCode.BAD_CHECKPOINT
            raise refuse(code, f"{entry.id} cannot be served: {entry.error}", param="model")
        if slot.phase is Phase.REFUSED:
            failure = refusal(host.supervisor)
            if failure is not None and not self._may_try_again(host):
                raise Refused(failure)
            if host.supervisor.state is State.FAILED:
                forgive(self.desk, host, time.monotonic())
            else:
                self.desk.moved(slot.model, Phase.ABSENT, time.monotonic())
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        lease = Lease(self, host, self.desk.ask(slot.model, client, time.monotonic()))
        self._leases[lease.waiter.key] = lease
        self.replan()
        return lease

    def _may_try_again(self, host: Host) -> bool:
        """After a while one more try is made, also of what failed for good: somebody may have mended it."""
        life, now = host.supervisor.life, time.monotonic()
        if life.state is State.EXHAUSTED:
            return now >= life.half_open_at
        return now >= life.since + self.settings.half_open_s

    def check_open(self) -> None:
        """Raises `Refused` (shutting_down)."""
        if self.is_closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")

    def _check_queue(self, client: str) -> None:
        """A full queue still takes the first request of a client that has none in it, up to twice the limit."""
        waiting, limit = self.desk.num_waiting, self.settings.queue_limit
        if waiting < limit or (waiting < 2 * limit and not self.desk.has_waiting(client)):
            return
        raise refuse(
            ErrorCode.QUEUE_FULL,
            f"{waiting} requests wait already; the limit is {limit} (setting queue_limit)",
            retry_after_s=1.0,
        )

    def requeue(self, lease: Lease) -> None:
        """The lease's worker is lost."""
        self.desk.requeue(lease.waiter, time.monotonic(), suspect=lease.is_suspect)
        self.replan()

    def cleared(self, lease: Lease) -> None:
        """The request has got further than at its last loss."""
        self.desk.cleared(lease.waiter)
        self.replan()

    def left(self, lease: Lease) -> None:
        """The request has ended."""
        self._leases.pop(lease.waiter.key, None)
        self.desk.leave(lease.waiter, time.monotonic())
        self.replan()

    def deny_all(self, slot: Slot, failure: Failure, *, before: float = FOREVER) -> None:
        """Answer everyone who waits for a model and came before that number."""
        for waiter in [waiter for waiter in slot.waiting if waiter.number < before]:
            self.desk.leave(waiter, time.monotonic())
            self._leases[waiter.key].deny(failure)

    def outstanding(self, model_id: str) -> int:
        """Requests of a model that wait or run."""
        slot = self.desk.slots.get(model_id)
        return len(slot.waiting) + len(slot.granted) if slot else 0

    # ------------------------------------------------------------ decisions

    def replan(self) -> None:
        """Something has happened: decide, and do it. Called again from within, it goes round once more."""
        if self._planning:
            self._again = True
            return
        if self.is_closing:
            return
        self._planning = self._again = True
        look_at = FOREVER
        try:
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
        self._on_queue()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if look_at != FOREVER:
            delay = max(0.0, look_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.replan)

    def _perform(self, action: Action) -> None:
        hosts = self.roster.hosts
        match action:
            case Give(waiter):
                client = hosts[waiter.model].supervisor.client
                assert client is not None  # the planner knows it as ready
                self._leases[waiter.key].give(client)
            case Deny(waiter, failure):
                self._leases[waiter.key].deny(failure)
            case Load(model, grant):
                self._load(hosts[model], grant)
            case Resize(model, grant):
                event(log, "model.resized", model=model, kv=grant.kv, prefix=grant.prefix)
                hosts[model].supervisor.resize(grant.kv, grant.prefix)
                self.crew.write_records()
            case Place(job):
                self.berths.placed(job)
            case Displace(job):
                self.berths.displaced(job)
            case Evict(model, why):
                held = self.desk.ledger.held_by(hosts[model].slot.account)
                event(log, "model.evicted", model=model, why=why, held=held)
                hosts[model].supervisor.unwant()

    def _load(self, host: Host, grant: Grant) -> None:
        event(log, "model.load", model=host.entry.id, bytes=grant.total, free=self.desk.ledger.free)
        host.prepare(host.supervisor, grant)
        afresh, host.starts_afresh = host.starts_afresh, False
        if afresh:
            host.supervisor.restart()
        else:
            host.supervisor.want()

    # ------------------------------------------------------------ events of workers

    def _worker_moved(self, supervisor: Supervisor) -> None:
        try:
            self._take_in(supervisor)
        except Exception:  # the supervisor that tells us must not break down over a bug of ours
            log.exception("pool.bug")

    def _take_in(self, supervisor: Supervisor) -> None:
        host = self.crew.hosts[supervisor]
        if self._seen.get(supervisor) is not supervisor.state:
            self._seen[supervisor] = supervisor.state
            if supervisor is host.supervisor:
                self._served_moved(host)
            elif supervisor is host.successor:
                rollout.moved(self.crew, self.desk, host, self.device)
                if supervisor is host.supervisor:
                    self.mounts.came_up(host)
            elif supervisor.state is State.ABSENT:
                self.crew.dismiss(supervisor)
                del self._seen[supervisor]
            self.crew.write_records()
            self.replan()
        self._on_change()

    def _served_moved(self, host: Host) -> None:
        supervisor, slot, now = host.supervisor, host.slot, time.monotonic()
        phase = phase_of(supervisor)
        if phase is Phase.READY and slot.phase is not Phase.READY:
            self.crew.settle(host, supervisor)
            if host.successor is None:
                host.good = host.running
        if phase in (Phase.ABSENT, Phase.REFUSED):
            self.crew.close_account(supervisor)
            if not host.comes_back:
                self.mounts.went(host)
        self.desk.moved(slot.model, phase, now)
        if phase is Phase.READY:
            slot.room = supervisor.launch.max_rows
            self.mounts.came_up(host)
            rollout.begin(self.crew, self.desk, host, self.device)  # the settings may have changed meanwhile
        elif phase is Phase.ABSENT and host.comes_back:
            host.comes_back = False
            slot.kept_since = now
        elif phase is Phase.REFUSED and not rollout.go_back(self.desk, host, self.device):
            slot.kept_since = None
            if failure := refusal(supervisor):
                self.deny_all(slot, failure)

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            if self.crew.measure():
                self.replan()

    # ------------------------------------------------------------ shutdown

    def supervisors(self) -> list[Supervisor]:
        return list(self.crew.hosts)

    def close(self) -> None:
        """Grant nothing any more; those who wait are answered now. Requests that run go on."""
        self.is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._measuring is not None:
            self._measuring.cancel()
        for slot in self.desk.slots.values():
            self.deny_all(slot, Failure(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))

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


def policy_of(settings: Settings) -> Policy:
    """The planner's numbers."""
    return Policy(**{name: getattr(settings, name) for name in Policy.__struct_fields__})
