"""Jobs in the planner: who gets memory first, who gives way, and when answers wait for a job."""

import pytest

from parent.pool.berths import Berths
from parent.pool.desk import Berth, Phase, Policy
from parent.pool.ledger import Bill
from parent.pool.plan import Displace, Place
from tests.parent.pool_world import World, world


def job(w: World, name: str, need: int, *, may_leave: bool = True) -> Berth:
    """A job asks for its place."""
    berth = Berth(name, need, w.now, may_leave=may_leave)
    w.desk.berths[name] = berth
    w.plan()
    return berth


def leave(w: World, name: str) -> None:
    del w.desk.berths[name]
    if w.desk.closed_for == name:
        w.desk.closed_for = ""
    w.desk.ledger.release(name)
    w.plan()


def placed(w: World) -> list[str]:
    return [action.job for action in w.log if isinstance(action, Place)]


def displaced(w: World) -> list[str]:
    return [action.job for action in w.log if isinstance(action, Displace)]


def test_a_job_that_fits_begins_at_once_and_is_charged() -> None:
    w = world()
    w.resident("a")
    assert job(w, "j", 4).is_placed
    assert (w.desk.ledger.held_by("j"), w.desk.ledger.accounts["j"].kind) == (4, "job")
    assert w.evicted() == []
    w.plan()
    assert placed(w) == ["j"]


def test_a_job_waits_with_the_numbers_and_an_idle_model_leaves_for_it() -> None:
    w = world(linger_s=0.25, min_residency_s=0)
    w.resident("a")
    berth = job(w, "j", 6)
    assert berth.waits_for == "memory: it needs 6 B, 4 B are free"
    assert w.phase("a") is Phase.READY
    w.wait(0.25)
    assert w.phase("a") is Phase.LEAVING
    assert not berth.is_placed
    w.gone("a")
    assert berth.is_placed


@pytest.mark.parametrize("why", ["running", "pinned", "rolling"])
def test_no_model_with_work_leaves_for_a_job(why: str) -> None:
    w = world(linger_s=0, min_residency_s=0)
    w.resident("a")
    if why == "running":
        w.ask("a")
    w.desk.slots["a"].is_pinned = why == "pinned"
    w.desk.slots["a"].is_rolling = why == "rolling"
    berth = job(w, "j", 6)
    w.wait(1000)
    assert w.evicted() == []
    assert not berth.is_placed


def test_nobody_leaves_for_a_job_that_would_still_not_fit() -> None:
    w = world(budget=12, linger_s=0, min_residency_s=0)
    w.resident("a", "b")
    w.ask("a")
    job(w, "j", 7)
    w.wait(10)
    assert w.evicted() == []


def test_what_a_model_has_beyond_the_least_is_taken_first() -> None:
    w = world(budget=20)
    w.desk.slot("a").bill = Bill(weights=6, prefix_wish=10)
    w.resident("a")
    held = w.desk.ledger.held_by("a")
    job(w, "j", 20 - held + 1)
    assert w.evicted() == []
    assert w.desk.ledger.held_by("a") < held
    assert placed(w) == ["j"]


def test_a_model_that_was_waited_for_longer_goes_before_a_job_and_a_younger_one_behind_it() -> None:
    w = world(linger_s=0, min_residency_s=0)
    w.resident("a")
    running = w.ask("a")
    w.now += 1
    w.ask("b")
    w.now += 1
    berth = job(w, "j", 4)
    assert berth.waits_for == "b has been waited for longer"
    w.done(running)
    w.gone("a")
    assert w.phase("b") is Phase.LOADING
    assert berth.is_placed


def test_jobs_begin_in_order_of_age_also_where_the_second_would_fit() -> None:
    w = world()
    w.resident("a")
    w.ask("a")
    first = job(w, "one", 6)
    w.now += 1
    second = job(w, "two", 1)
    assert (first.is_placed, second.is_placed) == (False, False)
    leave(w, "one")
    assert second.is_placed


def test_a_job_makes_room_for_a_model_that_starves_where_it_can_go_on_later() -> None:
    w = world(starve_s=5)
    job(w, "j", 6)
    w.ask("a")
    w.wait(4)
    assert displaced(w) == []
    assert w.look_at <= w.now + 1
    w.wait(1.5)
    assert displaced(w) == ["j"]
    w.wait(1)
    assert displaced(w) == ["j"]  # it was asked
    leave(w, "j")
    assert w.phase("a") is Phase.LOADING


def test_a_job_that_could_not_go_on_is_left_alone() -> None:
    w = world(starve_s=5)
    job(w, "j", 6, may_leave=False)
    w.ask("a")
    w.wait(1000)
    assert displaced(w) == []


def test_idle_jobs_begin_when_nobody_was_answered_for_a_while() -> None:
    w = World(policy=Policy(jobs_run="idle", jobs_quiet_s=2))
    w.model("a", 4)
    w.resident("a")
    running = w.ask("a")
    berth = job(w, "j", 4)
    assert berth.waits_for == "answers"
    w.done(running)
    assert berth.waits_for == "a quiet moment"
    w.wait(1.5)
    assert not berth.is_placed
    w.wait(0.5)
    assert berth.is_placed
    assert w.ask("a").is_granted


def test_an_exclusive_job_awaits_what_runs_and_everything_after_awaits_it() -> None:
    w = World(policy=Policy(jobs_run="exclusive"))
    w.model("a", 4)
    w.resident("a")
    running = w.ask("a")
    berth = job(w, "j", 4)
    assert berth.waits_for == "1 running answers"
    later = w.ask("a")
    assert not later.is_granted
    w.done(running)
    assert berth.is_placed
    assert not later.is_granted
    w.wait(1000)
    assert not later.is_granted
    leave(w, "j")
    assert later.is_granted


def test_an_exclusive_job_that_is_given_up_lets_answers_go_on() -> None:
    w = World(policy=Policy(jobs_run="exclusive"))
    w.model("a", 4)
    w.resident("a")
    w.ask("a")
    job(w, "j", 4)
    later = w.ask("a")
    leave(w, "j")
    assert later.is_granted


def test_berths_are_asked_for_adopted_measured_and_left() -> None:
    w = world(budget=1 << 30)
    berths = Berths(w.desk, w.plan)
    assert berths.ask("j", 1 << 29, may_leave=True) == ""
    assert berths.ask("j", 1 << 29, may_leave=True) == ""
    assert "its turn" not in berths.ask("k", 1 << 30, may_leave=True)
    berths.measure("j", 3 << 28)
    assert w.desk.ledger.held == 3 << 28
    berths.adopt("old", 1 << 30, 0, may_leave=True)  # it runs: it is charged whether it fits or not
    assert w.desk.ledger.free < 0
    for name in ("old", "j", "j"):
        berths.leave(name)
    assert berths.ask("k", 1 << 30, may_leave=True) == ""
    failure = berths.never_fits((1 << 30) + 1)
    assert failure is not None
    assert "can have at most" in failure.message
    assert berths.never_fits(1 << 30) is None
