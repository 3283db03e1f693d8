"""The watchdog: silence, standstill, long steps and stopped processes, each told from what is no fault."""

import pytest

from parent.workers.watchdog import Verdict, Watchdog
from shared.wire import WorkerStats

IDLE = WorkerStats()


def busy(**counters: float) -> WorkerStats:
    return WorkerStats(**{"active": 1, **counters})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heard_at", "busy_s", "checks", "verdict"),
    [
        (0.0, 0.0, [1.0, 2.0], Verdict.ALIVE),
        (0.0, 0.0, [1.0, 2.0, 3.0], Verdict.SLOW),
        (0.0, 0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 5.1], Verdict.HUNG),
        (0.0, 40.0, [1.0], Verdict.SLOW),
        (0.0, 121.0, [1.0], Verdict.HUNG),
        (0.0, 0.0, [1.0, 500.0], Verdict.ALIVE),  # the parent itself slept
        (0.0, 0.0, [1.0, 500.0, 501.0, 502.0, 503.0, 504.0, 505.1], Verdict.HUNG),
    ],
)
def test_silence_and_long_steps_are_told_from_the_parents_own_sleep(
    heard_at: float, busy_s: float, checks: list[float], verdict: Verdict
) -> None:
    dog = Watchdog(5.0, 120.0, heard_at)
    dog.heartbeat(IDLE, busy_s, heard_at)
    assert [dog.check(now) for now in checks][-1] is verdict


def live(dog: Watchdog, beats: list[WorkerStats], busy_s: float = 0.0) -> list[Verdict]:
    """One heartbeat and one look a second."""
    seen = []
    for second, stats in enumerate(beats, 1):
        dog.heartbeat(stats, busy_s, float(second))
        seen.append(dog.check(second + 0.5))
    return seen


@pytest.mark.parametrize(
    ("slowest_s", "limit_s"), [(0.0, 60.0), (0.01, 10.0), (1.0, 10.0), (2.5, 25.0), (50.0, 60.0)]
)
def test_the_limit_is_scaled_by_the_slowest_step_within_bounds(slowest_s: float, limit_s: float) -> None:
    dog = Watchdog(5.0, 60.0, 0.0)
    dog.heartbeat(WorkerStats(slowest_s=slowest_s), 0.0, 1.0)
    assert dog.limit_s == limit_s


@pytest.mark.parametrize("counter", ["steps", "chunks", "tokens"])
def test_work_that_goes_on_by_any_counter_is_alive(counter: str) -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    beats = [busy(slowest_s=0.1, **{counter: second // 2}) for second in range(40)]
    assert set(live(dog, beats)) == {Verdict.ALIVE}


@pytest.mark.parametrize("work", [{"active": 1}, {"active": 0, "waiting": 3}])
def test_work_that_stands_still_is_hung_after_the_limit_and_the_reason_has_the_numbers(
    work: dict[str, float],
) -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    still = busy(steps=7, chunks=2, tokens=5, slowest_s=0.5, **work)
    verdicts = live(dog, [IDLE, IDLE, *[still] * 13])
    assert verdicts.index(Verdict.HUNG) == 13  # seen moving at 3 s, still for more than 10 s at 14 s
    assert "got nowhere for 12.0 s, at 7 steps, 2 chunks, 5 tokens" in dog.reason(15.5)
    assert "the limit is 10 s, the slowest so far took 0.50 s" in dog.reason(15.5)


def test_nothing_to_do_is_no_standstill() -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    assert set(live(dog, [WorkerStats(slowest_s=0.1, steps=3)] * 50)) == {Verdict.ALIVE}


def test_a_long_prefill_within_the_limit_is_left_alone() -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    for second in range(1, 110):
        dog.heartbeat(busy(), float(second), float(second))
        assert dog.check(second + 0.5) is not Verdict.HUNG


def test_a_sleep_of_the_parent_is_no_standstill_either() -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    still = busy(steps=7, slowest_s=0.5)
    live(dog, [still] * 5)
    assert dog.check(900.0) is Verdict.ALIVE
    dog.heartbeat(still, 0.0, 901.0)
    assert dog.check(901.0) is Verdict.ALIVE


def test_a_process_that_is_stopped_again_and_again_is_given_up() -> None:
    dog = Watchdog(5.0, 120.0, 0.0)
    assert dog.stopped(1.0)
    assert dog.stopped(30.0)
    assert dog.stopped(62.0)  # the first is a minute ago
    assert dog.check(62.1) is Verdict.ALIVE
    assert not dog.stopped(63.0)
    assert dog.check(63.1) is Verdict.HUNG
    assert "stopped 3 times within 60 s" in dog.reason(63.1)


def test_somebody_looks_for_a_stopped_process_at_half_the_silence() -> None:
    dog = Watchdog(4.0, 120.0, 0.0)
    dog.heartbeat(IDLE, 0.0, 1.0)
    assert not dog.is_silent(3.0)
    assert dog.is_silent(3.1)
