"""One model's workers: the one that requests go to, perhaps a successor beside it, and those that leave."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from parent.library.catalog import ModelEntry
from parent.model_options import ModelOptions
from parent.pool.desk import Phase, Slot
from parent.pool.estimate import Recipe
from parent.pool.ledger import Grant
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared.errors import Failure


@dataclass
class Mount:
    """An adapter that the model's worker holds, or will hold again when it comes back."""

    id: str
    path: Path
    num_bytes: int
    last_used: float


class Host:
    """A model of the pool. Its slot in the books has the same life."""

    def __init__(self, entry: ModelEntry, slot: Slot, recipe: Recipe, supervisor: Supervisor) -> None:
        self.entry = entry
        self.options = ModelOptions()
        self.slot = slot
        self.recipe = recipe  # what the settings say
        self.running = recipe  # what the worker was started with, or will be
        self.good: Recipe | None = None  # the last one that became ready
        self.bad: Recipe | None = None  # the one after it, that did not
        self.supervisor = supervisor
        self.successor: Supervisor | None = None
        self.leaving: list[Supervisor] = []
        self.starts_afresh = False  # an operator's wish: earlier failures do not count
        self.comes_back = False  # it leaves only to be loaded again, with other settings
        self.keep_alive_s = -1.0  # as configured, when last looked at
        self.rollout = ""  # how the last change of settings ended, where it did not go well
        self.adapters: dict[str, Mount] = {}  # by key
        self.adapter_users: Counter[str] = Counter()  # requests by key
        self.doomed: dict[str, Failure] = {}  # by socket: what a request that is lost there is told

    @property
    def adapter_bytes(self) -> int:
        """Of all that are mounted."""
        return sum(mount.num_bytes for mount in self.adapters.values())

    @property
    def phase(self) -> Phase:
        """What the worker's state means to the planner."""
        return phase_of(self.supervisor)

    @property
    def supervisors(self) -> list[Supervisor]:
        successor = [] if self.successor is None else [self.successor]
        return [self.supervisor, *successor, *self.leaving]

    def prepare(self, supervisor: Supervisor, grant: Grant) -> None:
        """Tell a supervisor what its next worker is to be."""
        self.running = self.recipe
        supervisor.command = list(self.recipe.command)
        caps = {} if not grant.kv and not grant.prefix else {"kv_bytes": grant.kv}
        supervisor.launch = replace(
            self.recipe.launch,
            **caps,
            prefix_cache_bytes=min(grant.prefix, self.recipe.launch.prefix_cache_bytes),
        )


def phase_of(supervisor: Supervisor) -> Phase:
    """A worker's state, in the planner's words."""
    if supervisor.state is State.READY:
        return Phase.READY
    if supervisor.state is State.ABSENT:
        return Phase.ABSENT
    if supervisor.state in (State.FAILED, State.EXHAUSTED):
        return Phase.REFUSED
    return Phase.LOADING if supervisor.life.wanted else Phase.LEAVING
