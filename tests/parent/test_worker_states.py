"""Table W: its rows, its restart rule, and (by random walks) that nothing in it is a dead end."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parent.workers.restarts import RestartBudget
from parent.workers.states import (
    GUARDS,
    TABLE,
    Effect,
    Event,
    IllegalTransition,
    Lifecycle,
    Limits,
    Signal,
    State,
    markdown,
)
from shared.errors import ErrorCode, Failure

DIED = Failure(ErrorCode.ENGINE_UNAVAILABLE, "the worker was killed by SIGKILL")
BAD = Failure(ErrorCode.BAD_CHECKPOINT, "a shard is missing")
LIVE = {State.SPAWNING, State.LOADING, State.READY, State.DRAINING, State.STOPPING}


def walk(life: Lifecycle, *events: Event | Signal, now: float = 0.0) -> list[Effect]:
    """Feed events at one moment; the effects of all."""
    effects: list[Effect] = []
    for event in events:
        effects += life.handle(event if isinstance(event, Signal) else Signal(event), now)
    return effects


def ready(now: float = 0.0, **limits: float) -> Lifecycle:
    life = Lifecycle(Limits(**limits))  # type: ignore[arg-type]
    walk(life, Event.WANT, Event.HELLO, Event.READY, now=now)
    return life


def die(life: Lifecycle, now: float, code: int = -9) -> None:
    walk(life, Signal(Event.EXIT, DIED, code), Event.MEASURED, now=now)


def test_a_worker_comes_up_and_goes_down_in_order() -> None:
    life = Lifecycle(Limits())
    assert walk(life, Event.WANT) == [Effect.SPAWN]
    assert walk(life, Event.HELLO) == [Effect.LAUNCH]
    assert walk(life, Event.PROGRESS, Event.READY, Event.HEARTBEAT) == []
    assert life.state is State.READY
    assert walk(life, Event.UNWANT) == [Effect.DRAIN]
    assert walk(life, Event.DRAINED) == [Effect.SHUTDOWN]
    assert walk(life, Signal(Event.EXIT, DIED, 0)) == [Effect.CUT, Effect.RECLAIM]
    walk(life, Event.MEASURED)
    assert life.state is State.ABSENT
    assert life.restarts.total == 0


def test_every_reachable_state_has_a_row_for_an_exit_while_a_process_lives() -> None:
    assert all((state, Event.EXIT) in TABLE for state in LIVE)


def test_every_state_that_waits_for_something_has_a_deadline_row() -> None:
    waiting = set(State) - {State.ABSENT, State.FAILED}
    assert {state for state, event in TABLE if event is Event.DEADLINE} == waiting


def test_every_guard_is_used_and_the_last_row_of_each_entry_is_not_guarded_or_total() -> None:
    used = {row.guard for rows in TABLE.values() for row in rows if row.guard}
    assert used == set(GUARDS)
    assert all(not rows[-1].guard for rows in TABLE.values())


def test_an_event_that_is_not_listed_is_illegal_and_changes_nothing() -> None:
    life = ready()
    for event in (Event.HELLO, Event.DRAINED, Event.MEASURED):
        with pytest.raises(IllegalTransition, match=f"{event} while ready"):
            walk(life, event)
        assert life.state is State.READY


def test_the_printed_table_names_every_transition() -> None:
    assert len(markdown().splitlines()) == 2 + sum(len(rows) for rows in TABLE.values())


@pytest.mark.parametrize(
    ("ages", "delays"),
    [
        ([100, 100, 100], [0, 0, 0]),  # never early: no back-off
        ([1, 1, 1], [0, 1, 2]),  # from the second early death in a row
        ([1, 100, 1], [0, 0, 0]),  # not in a row
    ],
)
def test_the_back_off_begins_with_the_second_early_death_in_a_row(
    ages: list[float], delays: list[float]
) -> None:
    budget = RestartBudget(99, 60.0)
    now, seen = 0.0, []
    for age in ages:
        budget.spawned(now, is_restart=False)
        now += age
        budget.died(now)
        seen.append(budget.delay_s)
    assert seen == delays


def test_the_fourth_death_within_the_window_exhausts_the_budget() -> None:
    life = ready()
    now = 20.0
    for restarts in range(1, 4):
        die(life, now)
        assert life.state is State.BACKOFF
        assert walk(life, Event.DEADLINE, now=now) == [Effect.SPAWN]
        assert life.restarts.total == restarts
        walk(life, Event.HELLO, Event.READY, now=now)
        now += 11.0
    die(life, now)
    assert life.state is State.EXHAUSTED


def test_deaths_that_are_far_apart_never_exhaust_the_budget() -> None:
    life, now = ready(), 0.0
    for _ in range(20):
        now += 21.0
        die(life, now)
        walk(life, Event.DEADLINE, Event.HELLO, Event.READY, now=now)
    assert life.state is State.READY


def test_exhausted_refuses_until_half_open_then_makes_one_try() -> None:
    life = ready(restart_budget=0)
    die(life, 1.0)
    assert life.state is State.EXHAUSTED
    assert walk(life, Event.WANT, now=30.0) == []
    walk(life, Event.DEADLINE, now=61.0)
    assert life.deadline_at is None
    assert walk(life, Event.WANT, now=62.0) == [Effect.SPAWN]
    die(life, 63.0)
    assert life.state is State.EXHAUSTED
    assert life.half_open_at == 123.0


@pytest.mark.parametrize("kill", [State.EXHAUSTED, State.FAILED])
def test_an_operators_restart_forgets_what_happened(kill: State) -> None:
    life = ready(restart_budget=0)
    if kill is State.EXHAUSTED:
        die(life, 1.0)
    else:
        walk(life, Signal(Event.FATAL, BAD), Signal(Event.EXIT, DIED, 3), Event.MEASURED, now=1.0)
    assert life.state is kill
    walk(life, Event.RESTART, now=2.0)
    assert life.deadline_at == 2.0
    assert walk(life, Event.DEADLINE, now=2.0) == [Effect.SPAWN]
    assert life.permanent is None


@pytest.mark.parametrize(
    ("fatal", "code", "permanent"),
    [
        (BAD, 3, BAD),
        (None, 2, Failure(ErrorCode.WIRE_MISMATCH, "")),
        (None, 3, Failure(ErrorCode.BAD_CHECKPOINT, "")),
        (None, 4, Failure(ErrorCode.CANNOT_FIT, "")),
        (None, 5, None),
        (None, 70, None),
        (None, -9, None),
    ],
)
def test_permanent_faults_lead_to_failed_and_are_not_tried_again(
    fatal: Failure | None, code: int, permanent: Failure | None
) -> None:
    life = Lifecycle(Limits())
    walk(life, Event.WANT, Event.HELLO)
    if fatal:
        walk(life, Signal(Event.FATAL, fatal))
    die(life, 1.0, code)
    assert life.state is (State.FAILED if permanent else State.BACKOFF)
    assert (life.permanent and life.permanent.code) == (permanent and permanent.code)


def test_the_stop_ladder_asks_terminates_and_kills() -> None:
    life = ready(stop_grace_s=3.0)
    assert Effect.SHUTDOWN in walk(life, Event.STOP, now=10.0)
    assert life.deadline_at == 11.0
    assert Effect.TERMINATE in walk(life, Event.DEADLINE, now=11.0)
    assert life.deadline_at == 14.0
    walk(life, Event.HEARTBEAT, now=13.0)
    assert life.deadline_at == 14.0
    assert Effect.KILL in walk(life, Event.DEADLINE, now=14.0)
    assert Effect.KILL in walk(life, Event.DEADLINE, now=17.0)


def test_a_hung_worker_is_asked_for_its_stacks_and_terminated() -> None:
    life = ready()
    assert walk(life, Signal(Event.DEADLINE, DIED), now=5.0) == [Effect.DUMP_STACKS, Effect.CUT]
    assert life.deadline_at == 5.5
    assert walk(life, Event.DEADLINE, now=5.5) == [Effect.TERMINATE, Effect.CUT]
    assert walk(life, Event.DEADLINE, now=8.5) == [Effect.KILL, Effect.CUT]


def test_progress_re_arms_the_stall_deadline_up_to_the_total() -> None:
    life = Lifecycle(Limits(load_stall_s=60, load_total_s=100))
    walk(life, Event.WANT, Event.HELLO, now=0.0)
    walk(life, Event.PROGRESS, now=30.0)
    assert life.deadline_at == 90.0
    walk(life, Event.HEARTBEAT, now=50.0)
    assert life.deadline_at == 90.0
    walk(life, Event.PROGRESS, now=80.0)
    assert life.deadline_at == 100.0


def test_a_crash_while_nobody_wants_the_worker_starts_nothing() -> None:
    life = ready()
    walk(life, Event.UNWANT, now=1.0)
    die(life, 2.0)
    assert life.state is State.ABSENT


def test_an_adopted_worker_is_ready_and_its_epoch_goes_on() -> None:
    life = Lifecycle(Limits())
    assert walk(life, Signal(Event.ADOPTED, epoch=7), now=100.0) == []
    assert (life.state, life.epoch, life.wanted) == (State.READY, 7, True)
    die(life, 200.0)
    assert life.state is State.BACKOFF
    assert walk(life, Event.DEADLINE, now=200.0) == [Effect.SPAWN]
    assert life.epoch == 8


class Walks(RuleBasedStateMachine):
    """Any order of events at any times: legal ones move, illegal ones change nothing, and all ends well."""

    @initialize()
    def begin(self) -> None:
        self.life = Lifecycle(Limits())
        self.now = 0.0
        self.processes = 0

    def feed(self, signal: Signal) -> None:
        before = (self.life.state, self.life.epoch)
        try:
            effects = self.life.handle(signal, self.now)
        except IllegalTransition:
            assert (self.life.state, self.life.epoch) == before
            return
        if signal.event is Event.EXIT:
            self.processes -= 1
        if signal.event is Event.ADOPTED:
            self.processes += 1
        self.processes += effects.count(Effect.SPAWN)

    @rule(
        event=st.sampled_from([event for event in Event if event not in (Event.EXIT, Event.MEASURED)]),
        failure=st.sampled_from([None, DIED, BAD]),
        later=st.floats(0, 100),
    )
    def something(self, event: Event, failure: Failure | None, later: float) -> None:
        self.now += later
        self.feed(Signal(event, failure if event in (Event.HELLO, Event.FATAL, Event.DEADLINE) else None))

    @precondition(lambda self: self.processes == 1)
    @rule(code=st.sampled_from([0, 2, 3, 4, 5, 70, -9, None]))
    def process_ends(self, code: int | None) -> None:
        self.feed(Signal(Event.EXIT, DIED, code))
        assert self.life.state is State.RECLAIMING

    @precondition(lambda self: self.life.state is State.RECLAIMING)
    @rule()
    def cleared(self) -> None:
        self.feed(Signal(Event.MEASURED))
        assert self.life.state is not State.RECLAIMING

    @invariant()
    def one_process_at_most_and_only_where_the_state_says_so(self) -> None:
        if hasattr(self, "life"):
            assert self.processes == (1 if self.life.state in LIVE else 0)

    @invariant()
    def a_state_that_waits_has_a_deadline(self) -> None:
        if hasattr(self, "life") and self.life.state not in (
            State.ABSENT,
            State.READY,
            State.FAILED,
            State.EXHAUSTED,
        ):
            assert self.life.deadline_at is not None

    def teardown(self) -> None:
        """Whatever happened: stop, and deadlines alone (with the kills they cause) end it."""
        if not hasattr(self, "life"):
            return
        self.feed(Signal(Event.STOP))
        for _ in range(10):
            if self.life.state is State.ABSENT:
                return
            if self.life.state is State.STOPPING and self.life.rung == 2:
                self.feed(Signal(Event.EXIT, DIED, -9))
            elif self.life.state is State.RECLAIMING:
                self.feed(Signal(Event.MEASURED))
            else:
                self.now += 1000.0
                self.feed(Signal(Event.DEADLINE))
        raise AssertionError(f"stuck in {self.life.state}")


TestWalks = Walks.TestCase
