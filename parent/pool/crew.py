"""The supervisors of all models, each with an account in the ledger: made here, measured here, written down here for a
later parent.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from parent.config import Settings
from parent.pool.desk import Desk, Phase
from parent.pool.host import Host
from parent.workers import launcher, runtime_file
from parent.workers.memory import Memory, SystemMemory
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import Limits
from parent.workers.supervisor import Supervisor
from shared.control import LaunchModel
from shared.logs import event

log = logging.getLogger(__name__)


class Crew:
    """Makes supervisors and keeps their accounts. `on_change` is told which one has changed."""

    def __init__(
        self,
        desk: Desk,
        settings: Settings,
        *,
        runtime_dir: Path,
        on_change: Callable[[Supervisor], None],
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.settings = settings
        self.command = command or launcher.default_command()
        self.hosts: dict[Supervisor, Host] = {}  # whose each one is
        self._desk = desk
        self._runtime_dir = runtime_dir
        self._on_change = on_change
        self._environment = launcher.worker_environment(environment or {})
        self._memory = memory or SystemMemory()
        self._numbers = iter(range(1 << 30))
        self._taken: set[str] = set()
        self._fault = ""  # of the last writing of the records

    def avoid(self, names: Iterable[str]) -> None:
        """Names of workers that an earlier parent left: ours must be others."""
        self._taken |= set(names)

    def make(self, launch: LaunchModel) -> Supervisor:
        """A supervisor with a name of its own. It is nobody's until `hosts` says whose."""
        name = next(name for number in self._numbers if (name := f"w{number}") not in self._taken)
        supervisor = Supervisor(
            launch,
            command=self.command,
            environment=self._environment,
            runtime_dir=self._runtime_dir,
            limits=limits_of(self.settings),
            heartbeat_s=self.settings.heartbeat_s,
            hung_s=self.settings.hung_s,
            name=name,
            memory=self._memory,
            beside=lambda: self._measured_beside(name),
            on_change=lambda: self._on_change(supervisor),
        )
        return supervisor

    def take_settings(self, settings: Settings) -> None:
        """The deadlines and budgets of every supervisor are these now."""
        self.settings = settings
        for supervisor in self.hosts:
            supervisor.retime(limits_of(settings), settings.heartbeat_s, settings.hung_s)

    def _measured_beside(self, name: str) -> int:
        accounts = self._desk.ledger.accounts.copy()
        return sum(account.measured for other, account in accounts.items() if other != name)

    # ------------------------------------------------------------ accounts

    def settle(self, host: Host, supervisor: Supervisor) -> None:
        """A worker is loaded: what it holds and what it cost are known now."""
        weights = supervisor.facts.weights_bytes if supervisor.facts else 0
        self._desk.ledger.settle(supervisor.name, weights)
        if supervisor.load_s:
            self._desk.learn(host.slot.model, supervisor.load_s)

    def close_account(self, supervisor: Supervisor) -> None:
        """Its process has gone; what it did not give back is booked as leaked."""
        missing = supervisor.missing_bytes
        if missing:
            event(log, "ledger.leaked", level=logging.WARNING, worker=supervisor.name, bytes=missing)
        self._desk.ledger.release(supervisor.name, missing)

    def dismiss(self, supervisor: Supervisor) -> None:
        """One that was replaced, or did not make it, has left for good."""
        host = self.hosts.pop(supervisor)
        host.leaving.remove(supervisor)
        self.close_account(supervisor)

    def measure(self) -> bool:
        """Look at what the workers hold, and whether missing memory has come back; True when that frees or takes."""
        ledger = self._desk.ledger
        free = ledger.free
        for supervisor in self.hosts:
            ledger.measure(supervisor.name, supervisor.footprint_bytes)
            if supervisor.name in ledger.missing:
                ledger.recover(supervisor.name, supervisor.missing_now())
        return ledger.free != free

    # ------------------------------------------------------------ for a later parent

    def records(self) -> list[RuntimeRecord]:
        """What a later parent needs to adopt the workers; of each model first the one that requests go to."""
        served = sorted(
            self.hosts, key=lambda supervisor: supervisor is not self.hosts[supervisor].supervisor
        )
        return [record for supervisor in served if (record := supervisor.record()) is not None]

    def write_records(self) -> str:
        """A full disk is no reason to stop: a later parent will load again, and nothing else is lost.

        Returns in a line why a later parent would not find every worker; "" = it would.
        """
        path, records = self._runtime_dir / runtime_file.NAME, self.records()
        fault = ""
        try:
            runtime_file.write(path, records)
        except OSError as error:
            if not runtime_file.names_all(path, records):
                fault = (
                    f"{path} cannot be written, by which workers are taken over: {error.strerror or error}"
                )
        if fault and fault != self._fault:
            event(log, "workers.not_written", level=logging.WARNING, reason=fault)
        self._fault = fault
        return fault


def limits_of(settings: Settings) -> Limits:
    """The deadlines of table W; settings of the same names."""
    return Limits(**{name: getattr(settings, name) for name in Limits.__struct_fields__})


def forgive(desk: Desk, host: Host, now: float) -> None:
    """Earlier failures of this model do not count any more."""
    host.starts_afresh = True
    desk.moved(host.slot.model, Phase.ABSENT, now)
