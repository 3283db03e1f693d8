"""The rules of the planner, by example."""

import pytest

from parent.pool.desk import Phase, Policy
from parent.pool.ledger import Bill
from parent.pool.plan import Deny, Load, Resize
from shared.errors import ErrorCode
from tests.parent.pool_world import world


def test_pool_loads_once_for_many_and_grants_them_all_when_ready() -> None:
    w = world()
    first, second = w.ask("a"), w.ask("a")
    assert [type(action) for action in w.log] == [Load]
    w.ready("a")
    assert first.is_granted
    assert second.is_granted


def test_pool_swaps_an_idle_model_after_it_lingered() -> None:
    w = world(linger_s=0.25, min_residency_s=0)
    w.resident("a")
    w.ask("b")
    assert w.phase("a") is Phase.READY
    assert w.look_at == w.now + 0.25
    w.wait(0.25)
    assert w.phase("a") is Phase.LEAVING
    assert w.phase("b") is Phase.ABSENT
    w.gone("a")
    assert w.phase("b") is Phase.LOADING


def test_pool_never_evicts_what_is_in_flight() -> None:
    w = world(starve_s=5)
    running = w.ask("a")
    w.ready("a")
    b = w.ask("b")
    w.wait(1000)
    assert w.evicted() == []
    assert not w.ask("a").is_granted  # its turn is over: what comes now waits
    w.done(running)
    assert w.evicted() == ["a"]
    w.gone("a")
    w.ready("b")
    assert b.is_granted


def test_pool_a_resident_model_never_waits_for_anothers_load() -> None:
    w = world(budget=12)
    w.resident("a")
    w.ask("b")
    assert w.phase("b") is Phase.LOADING
    assert w.ask("a").is_granted


def test_swap_serves_a_bounded_burst_before_it_gives_way() -> None:
    w = world(burst_requests=4, burst_s=1000, starve_s=1000, linger_s=2)
    w.resident("a")
    w.now += 1
    w.ask("b")
    served = 0
    for _ in range(10):
        waiter = w.ask("a")
        if not waiter.is_granted:
            break
        served += 1
        w.done(waiter)
    assert served == 4
    assert w.evicted() == ["a"]


def test_swap_gives_way_to_a_starving_model_after_one_batch() -> None:
    w = world(starve_s=3, burst_requests=100, burst_s=1000, linger_s=1000)
    w.resident("a")
    w.ask("b")
    w.wait(2.9)
    assert w.evicted() == []
    w.wait(0.2)
    assert w.evicted() == ["a"]


def test_swap_burst_time_grows_with_the_cost_of_the_reload() -> None:
    w = world(burst_s=1, burst_requests=1000, starve_s=1000)
    w.desk.learn("a", 10)
    w.desk.learn("b", 10)
    w.resident("a")
    w.ask("b")
    running = w.ask("a")
    w.wait(39)
    w.done(running)
    again = w.ask("a")
    assert again.is_granted
    w.wait(2)
    w.done(again)
    assert w.evicted() == ["a"]


def test_pool_evicts_the_least_recently_used_and_no_more_than_needed() -> None:
    w = world(budget=18, linger_s=0, min_residency_s=0)
    for name in "abc":
        w.resident(name)
        w.now += 1
    w.done(w.ask("a"))
    w.now += 1
    w.ask("d")
    assert w.evicted() == ["b"]


def test_pool_pins_are_never_evicted_and_count_against_what_can_fit() -> None:
    w = world(linger_s=0, min_residency_s=0, starve_s=1)
    w.desk.slot("a").is_pinned = True
    w.plan()
    w.ready("a")
    waiter = w.ask("b")
    denied = [action for action in w.log if isinstance(action, Deny)]
    assert [action.waiter for action in denied] == [waiter]
    assert denied[0].failure.code is ErrorCode.CANNOT_FIT
    assert "6 B" in denied[0].failure.message
    w.wait(1e6)
    assert w.evicted() == []


@pytest.mark.parametrize("keep", [0.0, 7.0])
def test_pool_unloads_what_is_idle_for_its_time(keep: float) -> None:
    w = world()
    w.desk.slot("a").keep_alive_s = keep
    waiter = w.ask("a")
    w.ready("a")
    w.wait(100)
    assert w.evicted() == []
    w.done(waiter)
    if keep:
        assert w.look_at == w.now + keep
        w.wait(keep)
    assert w.evicted() == ["a"]


def test_pool_a_load_that_nobody_waits_for_is_stopped_after_a_grace() -> None:
    w = world(abandon_s=5)
    w.done(w.ask("a"))
    w.wait(4)
    assert w.evicted() == []
    w.wait(2)
    assert w.evicted() == ["a"]


def test_pool_a_load_on_somebodys_word_goes_on_without_waiters() -> None:
    w = world(abandon_s=5)
    w.desk.slot("a").kept_since = w.now
    w.plan()
    w.wait(100)
    assert w.evicted() == []


def test_pool_unload_answers_who_is_here_and_not_who_comes() -> None:
    w = world()
    w.model("a", 6, room=1)
    running, queued = w.ask("a"), w.ask("a")
    w.ready("a")
    w.desk.unload("a")
    late = w.ask("a")
    w.done(running)
    assert queued.is_granted
    assert w.evicted() == []
    w.done(queued)
    assert w.evicted() == ["a"]
    w.gone("a")
    w.ready("a")
    assert late.is_granted


def test_pool_is_fair_between_clients() -> None:
    w = world()
    w.model("a", 6, room=2)
    greedy = [w.ask("a", "greedy") for _ in range(6)]
    modest = w.ask("a", "modest")
    w.ready("a")
    assert [waiter for waiter in [*greedy, modest] if waiter.is_granted] == [greedy[0], modest]


def test_pool_count_limit_holds_beside_the_bytes() -> None:
    w = world(budget=1000, max_resident=1, linger_s=0, min_residency_s=0)
    w.resident("a")
    w.ask("b")
    assert w.evicted() == ["a"]
    assert w.phase("b") is Phase.ABSENT
    w.gone("a")
    assert w.phase("b") is Phase.LOADING


def test_ledger_a_model_behind_a_blocked_one_may_use_free_room_until_that_one_starves() -> None:
    w = world(budget=10, starve_s=5, linger_s=1000)
    w.model("small", 2)
    w.model("tiny", 1)
    running = w.ask("a")
    w.ready("a")
    w.ask("b")
    w.ask("small")
    assert w.phase("small") is Phase.LOADING
    w.wait(6)
    w.ask("tiny")
    assert w.phase("tiny") is Phase.ABSENT
    w.done(running)
    assert "a" in w.evicted()


def test_ledger_overshoot_lets_idle_models_leave() -> None:
    w = world(budget=12)
    w.resident("a", "b")
    w.desk.ledger.measure("b", 9)
    w.plan()
    assert w.evicted() == ["a"]


def test_ledger_leaked_bytes_lower_the_budget_and_are_told() -> None:
    w = world(budget=12)
    w.desk.ledger.release("x", missing=7)
    w.ask("a")
    denied = [action for action in w.log if isinstance(action, Deny)]
    assert "did not come back" in denied[0].failure.message


def test_ledger_others_give_up_what_they_have_beyond_the_least_before_anybody_is_evicted() -> None:
    w = world(budget=14)
    for name in "ab":
        w.desk.slot(name).bill = Bill(weights=6, kv_least=1, kv_wish=2, prefix_wish=4)
    w.resident("a")
    account = w.desk.ledger.accounts["a"]
    assert account.reserved == 10  # the least is 7; half of the rest goes to it
    w.desk.ledger.measure("a", 9)
    w.ask("b")
    assert next(action for action in w.log if isinstance(action, Resize)).grant.total == 7
    assert w.phase("b") is Phase.ABSENT  # the worker has not let go yet
    w.desk.ledger.measure("a", 7)
    w.plan()
    assert w.phase("b") is Phase.LOADING
    assert w.evicted() == []


def test_ledger_a_worker_that_does_not_let_go_is_evicted_after_all() -> None:
    w = world(budget=14, linger_s=0, min_residency_s=0)
    for name in "ab":
        w.desk.slot(name).bill = Bill(weights=6, kv_least=1, prefix_wish=4)
    w.resident("a")
    w.desk.ledger.measure("a", 9)
    w.ask("b")
    assert w.evicted() == []
    w.wait(4)
    assert w.evicted() == ["a"]


def test_ledger_what_was_given_up_is_given_back_when_there_is_room_again() -> None:
    w = world(budget=14)
    for name in "ab":
        w.desk.slot(name).bill = Bill(weights=6, kv_least=1, prefix_wish=4)
    w.resident("a", "b")
    w.desk.slot("b").keep_alive_s = 0
    w.plan()
    w.gone("b")
    w.wait(100)
    assert w.desk.ledger.accounts["a"].reserved == 10


def test_ledger_a_pinned_model_gives_up_what_it_has_beyond_the_least() -> None:
    w = world(budget=20)
    w.desk.slot("a").bill = Bill(weights=4, kv_least=1, prefix_wish=12)
    w.desk.slot("a").is_pinned = True
    w.plan()
    w.ready("a")
    assert w.desk.ledger.held_by("a") == 12
    w.model("b", 14)
    w.ask("b")
    assert w.phase("b") is Phase.LOADING
    assert w.desk.ledger.held_by("a") == 6
    assert w.evicted() == []


def test_ledger_what_is_pinned_gives_way_in_part_beside_an_eviction() -> None:
    w = world(budget=25, linger_s=0, min_residency_s=0)
    for name, size in (("a", 6), ("b", 9), ("c", 12)):
        w.desk.slot(name).bill = Bill(weights=size, kv_least=1, kv_wish=3, prefix_wish=4)
    w.desk.slot("a").is_pinned = True
    w.plan()
    w.ready("a")
    w.resident("b")
    waiter = w.ask("c")
    w.gone("b")
    w.ready("c")
    assert waiter.is_granted


def test_ledger_a_lowered_budget_takes_back_before_it_evicts() -> None:
    w = world(budget=40)
    w.desk.slot("a").bill = Bill(weights=6, kv_least=1, prefix_wish=20)
    w.resident("a")
    assert w.desk.ledger.held_by("a") == 23
    w.desk.ledger.budget = 10
    w.plan()
    assert w.desk.ledger.held_by("a") == 10
    assert w.evicted() == []
    w.desk.ledger.budget = 6
    w.plan()
    assert w.evicted() == ["a"]


def test_pool_a_lowered_count_lets_idle_models_leave() -> None:
    w = world(budget=1000)
    w.resident("a", "b", "c")
    w.desk.policy = Policy(max_resident=1)
    w.plan()
    assert w.evicted() == ["a", "b"]


def test_pool_who_lost_a_worker_comes_before_all_others_in_the_order_of_arrival() -> None:
    w = world()
    w.model("a", 6, room=3)
    lost = [w.ask("a", str(number)) for number in range(3)]
    w.ready("a")
    waiting = w.ask("a", "late")
    w.desk.moved("a", Phase.LOADING, w.now)
    for waiter in (lost[2], lost[0], lost[1]):
        w.desk.requeue(waiter, w.now)
    assert w.desk.slots["a"].waiting == [*lost, waiting]
    w.ready("a")
    # One suspect at a time, beside those who are none.
    assert [waiter.is_granted for waiter in [*lost, waiting]] == [True, False, False, True]
    w.desk.cleared(lost[0])
    w.plan()
    assert [waiter.is_granted for waiter in [*lost, waiting]] == [True, True, False, True]
