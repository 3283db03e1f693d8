"""A desk with a clock and workers that do what they are told, for the tests of the planner."""

from dataclasses import dataclass, field

from parent.pool.desk import FOREVER, Desk, Phase, Policy, Waiter
from parent.pool.ledger import Bill, Ledger
from parent.pool.plan import Action, Evict, plan


@dataclass
class World:
    """A desk with a clock; workers that do what they are told, when the test says so."""

    budget: int = 10
    policy: Policy = field(default_factory=Policy)
    now: float = 100.0
    sizes: dict[str, int] = field(default_factory=dict)
    log: list[Action] = field(default_factory=list)
    look_at: float = FOREVER

    def __post_init__(self) -> None:
        self.desk = Desk(Ledger(self.budget), self.policy)

    def model(self, name: str, size: int, room: int = 2) -> None:
        slot = self.desk.slot(name)
        slot.bill = Bill(weights=size)
        slot.room = room

    def ask(self, model: str, client: str = "c") -> Waiter:
        waiter = self.desk.ask(model, client, self.now)
        self.plan()
        return waiter

    def plan(self) -> list[Action]:
        """Plan, and what a pool would do at once."""
        actions, self.look_at = plan(self.desk, self.now)
        self.log += actions
        return actions

    def ready(self, model: str) -> None:
        self.desk.moved(model, Phase.READY, self.now)
        self.plan()

    def gone(self, model: str) -> None:
        slot = self.desk.slots[model]
        self.desk.ledger.release(slot.account)
        self.desk.moved(model, Phase.ABSENT, self.now)
        self.plan()

    def done(self, waiter: Waiter) -> None:
        self.desk.leave(waiter, self.now)
        self.plan()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.plan()

    def resident(self, *models: str) -> None:
        for model in models:
            self.done_after_load(model)

    def done_after_load(self, model: str) -> None:
        waiter = self.ask(model)
        self.ready(model)
        self.done(waiter)

    def phase(self, model: str) -> Phase:
        return self.desk.slots[model].phase

    def evicted(self) -> list[str]:
        return [action.model for action in self.log if isinstance(action, Evict)]


def world(budget: int = 10, **policy: float) -> World:
    made = World(budget=budget, policy=Policy(**policy))  # type: ignore[arg-type]
    for name in "abcd":
        made.model(name, 6)
    return made
