"""Invariants of the planner under random events, with a fake clock and fake workers."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parent.pool.desk import Phase, Policy, Waiter
from parent.pool.ledger import Bill
from parent.pool.plan import Deny, Evict, Give, Load, plan
from tests.parent.pool_world import World


@settings(max_examples=150, stateful_step_count=60)
class PoolMachine(RuleBasedStateMachine):
    """Random clients, loads, crashes and clocks; the invariants of the design after every step."""

    @initialize(
        budget=st.integers(8, 30),
        max_resident=st.integers(0, 3),
        sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5),
        pinned=st.booleans(),
        burst=st.integers(1, 5),
    )
    def begin(self, budget: int, max_resident: int, sizes: list[int], pinned: bool, burst: int) -> None:
        self.world = World(
            budget=budget,
            policy=Policy(
                max_resident=max_resident, burst_requests=burst, starve_s=20, burst_s=4, abandon_s=2
            ),
        )
        for number, size in enumerate(sizes):
            self.world.model(f"m{number}", size)
            self.world.desk.slot(f"m{number}").bill = Bill(weights=size, kv_least=1, kv_wish=3, prefix_wish=4)
        if pinned and sizes[0] + 1 <= budget // 2:
            self.world.desk.slot("m0").is_pinned = True
        self.open: list[Waiter] = []
        self.answered: set[Waiter] = set()

    @property
    def models(self) -> list[str]:
        return list(self.world.desk.slots)

    def step(self) -> None:
        """Plan as the pool does, and hold each action against the law."""
        desk = self.world.desk
        granted = {slot.model: set(slot.granted) for slot in desk.slots.values()}
        for action in self.world.plan():
            if isinstance(action, Evict):
                assert not granted[action.model], "evicted with requests in flight"
                assert not desk.slots[action.model].is_pinned, "evicted though pinned"
            elif isinstance(action, Load):
                slot = desk.slots[action.model]
                assert slot.waiting or slot.is_pinned or slot.kept_since is not None
            elif isinstance(action, Give):
                assert desk.slots[action.waiter.model].phase is Phase.READY
            elif isinstance(action, Deny):
                self.answered.add(action.waiter)
        again = plan(desk, self.world.now)
        assert again.actions == [], "not idempotent"
        assert again.look_at > self.world.now

    @rule(index=st.integers(0, 4), client=st.sampled_from("xyz"))
    def ask(self, index: int, client: str) -> None:
        model = self.models[index % len(self.models)]
        self.open.append(self.world.desk.ask(model, client, self.world.now))
        self.step()

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        waiter = self.open.pop(index % len(self.open))
        self.answered.add(waiter)
        self.world.desk.leave(waiter, self.world.now)
        self.step()

    @rule(index=st.integers(0, 4))
    def advance(self, index: int) -> None:
        """A worker does the next thing that it is to do."""
        slot = self.world.desk.slots[self.models[index % len(self.models)]]
        if slot.phase is Phase.LOADING:
            self.world.desk.ledger.settle(slot.account, slot.bill.weights)
            self.world.desk.moved(slot.model, Phase.READY, self.world.now)
        elif slot.phase is Phase.LEAVING:
            self.world.desk.ledger.release(slot.account)
            self.world.desk.moved(slot.model, Phase.ABSENT, self.world.now)
        self.step()

    @rule(index=st.integers(0, 4))
    def crash(self, index: int) -> None:
        """A ready worker dies: its requests wait again, and it is on its way back."""
        slot = self.world.desk.slots[self.models[index % len(self.models)]]
        if slot.phase is Phase.READY:
            self.world.desk.moved(slot.model, Phase.LOADING, self.world.now)
            for waiter in list(slot.granted):
                self.world.desk.requeue(waiter, self.world.now)
        self.step()

    @rule(index=st.integers(0, 4), share=st.floats(0, 1))
    def measure(self, index: int, share: float) -> None:
        """A worker is seen to hold some of what it may."""
        account = self.world.desk.ledger.accounts.get(self.models[index % len(self.models)])
        if account is not None:
            account.measured = int(account.reserved * share)
        self.step()

    @rule(index=st.integers(0, 4))
    def get_further(self, index: int) -> None:
        """A suspect gets something new."""
        for waiter in self.world.desk.slots[self.models[index % len(self.models)]].granted:
            self.world.desk.cleared(waiter)
        self.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.step()

    @invariant()
    def books_are_right(self) -> None:
        ledger = self.world.desk.ledger
        assert ledger.reserved <= ledger.usable
        limit = self.world.policy.max_resident
        assert not limit or ledger.count("model") <= limit
        for slot in self.world.desk.slots.values():
            assert len(slot.granted) <= slot.room
            assert sum(waiter.is_suspect for waiter in slot.granted) <= 1
            has_account = slot.account in ledger.accounts
            assert has_account == (slot.phase not in (Phase.ABSENT, Phase.REFUSED))

    def teardown(self) -> None:
        """From any state: with workers that work and answers that end, every request is answered."""
        if not hasattr(self, "world"):
            return
        for _ in range(400):
            if not any(slot.waiting or slot.granted for slot in self.world.desk.slots.values()):
                return
            for index in range(len(self.models)):
                self.advance(index)
            for slot in self.world.desk.slots.values():
                self.world.desk.ledger.measure(slot.account, 0)
                for waiter in list(slot.granted):
                    self.world.desk.leave(waiter, self.world.now)
            self.world.now += 0.5
            self.step()
        raise AssertionError("requests wait for ever")


TestPoolMachine = PoolMachine.TestCase
