"""What the queue is told from outside: the settings, and where jobs get their room in memory."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from parent.config import Settings
from parent.jobs.retention import Retention
from shared.errors import Failure


class Policy(NamedTuple):
    """What the settings say. `grace_s`: a job's process works on so long without a server. `yields`: jobs on the GPU
    wait between two steps while answers run, and `quiet_s` longer.
    """

    retention: Retention = Retention()
    grace_s: float = 0.0
    yields: bool = True
    quiet_s: float = 2.0


def policy_of(settings: Settings) -> Policy:
    """What these settings say."""
    return Policy(
        Retention(settings.jobs_keep_days * 86400.0, settings.jobs_bytes),
        settings.adopt_grace_s,
        settings.jobs_run != "exclusive",
        settings.jobs_quiet_s,
    )


class Places(Protocol):
    """Room in memory; `parent.pool.berths` has it. `ask` says why a job has to wait, "" = it may begin."""

    on_placed: Callable[[str], None]
    on_displaced: Callable[[str], None]

    def ask(self, job: str, need: int, *, may_leave: bool) -> str: ...
    def adopt(self, job: str, need: int, measured: int, *, may_leave: bool) -> None: ...
    def leave(self, job: str) -> None: ...
    def measure(self, job: str, held: int) -> None: ...
    def never_fits(self, need: int) -> Failure | None: ...
