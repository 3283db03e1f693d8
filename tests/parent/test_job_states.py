"""Table J and the retries: nothing gets stuck, nothing comes back from the end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.jobs import retry
from parent.jobs.states import (
    ACTIVE,
    GUARDS,
    TABLE,
    TERMINAL,
    Event,
    Facts,
    IllegalTransition,
    State,
    advance,
    markdown,
)
from shared.errors import ErrorCode, Failure
from shared.jobs import JobStage

FACTS = [
    Facts(resumable, transient, deaths_left, verdict, begun)
    for resumable, transient, deaths_left, begun in itertools.product((True, False), repeat=4)
    for verdict in (State.QUEUED, State.PAUSED, State.DONE, State.FAILED, State.CANCELLED)
]


def test_every_state_is_reached_and_every_state_but_the_last_ones_is_left() -> None:
    reached = {State.QUEUED}
    while True:
        more = {
            advance(state, event, facts)[0]
            for state, event in TABLE
            if state in reached
            for facts in FACTS
            if not isinstance(_attempt(state, event, facts), IllegalTransition)
        }
        if more <= reached:
            break
        reached |= more
    assert reached == set(State)
    assert {state for state, _ in TABLE} == set(State) - TERMINAL


def _attempt(state: State, event: Event, facts: Facts) -> object:
    try:
        return advance(state, event, facts)
    except IllegalTransition as error:
        return error


@pytest.mark.parametrize("state", sorted(ACTIVE))
@pytest.mark.parametrize("event", [Event.EXIT, Event.DEADLINE, Event.ORPHANED, Event.YIELDED, Event.CANCEL])
def test_a_job_with_a_process_has_a_way_on_whatever_happens(state: State, event: Event) -> None:
    for facts in FACTS:
        target, verdict = advance(state, event, facts)
        assert (verdict is not None) == (target is State.STOPPING)
        if event in (Event.EXIT, Event.ORPHANED):
            assert target not in ACTIVE


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_the_end_is_the_end(state: State) -> None:
    for event in Event:
        with pytest.raises(IllegalTransition, match=f"{event} while {state}"):
            advance(state, event, Facts())


@pytest.mark.parametrize(
    ("verdict", "event", "becomes"),
    [
        (State.PAUSED, Event.DONE, State.DONE),  # it was quicker
        (State.PAUSED, Event.RESUME, State.QUEUED),
        (State.PAUSED, Event.CANCEL, State.CANCELLED),
        (State.QUEUED, Event.PAUSE, State.PAUSED),
        (State.CANCELLED, Event.DONE, State.CANCELLED),
        (State.CANCELLED, Event.RESUME, State.CANCELLED),
        (State.DONE, Event.CANCEL, State.DONE),
        (State.FAILED, Event.PAUSE, State.FAILED),
    ],
)
def test_the_first_verdict_wins_unless_the_job_was_on_its_way_back(
    verdict: State, event: Event, becomes: State
) -> None:
    facts = Facts(resumable=True, verdict=verdict)
    assert advance(State.STOPPING, event, facts) == (State.STOPPING, becomes)
    assert advance(State.STOPPING, Event.EXIT, Facts(verdict=becomes)) == (becomes, None)


def test_guards_are_known_and_the_last_row_of_what_a_process_does_always_holds() -> None:
    for (_, event), rows in TABLE.items():
        assert all(not row.guard or row.guard in GUARDS for row in rows)
        if event is not Event.PAUSE:
            assert rows[-1].guard == ""


def test_the_table_prints_a_line_for_each_row() -> None:
    assert markdown().count("\n") == sum(map(len, TABLE.values())) + 1


LOST = Failure(ErrorCode.HUB, "the network is gone", retry_after_s=0.0)


def test_tries_without_anything_new_wait_twice_as_long_each_and_end() -> None:
    delays, fruitless = [], 0
    while True:
        fruitless, delay = retry.after(LOST, fruitless, grew=False)
        if delay is None:
            break
        delays.append(delay)
    assert delays == [1, 2, 4, 8, 16, 32, 60]
    assert fruitless == 8


def test_a_try_that_brought_something_begins_the_count_anew() -> None:
    assert retry.after(LOST, 7, grew=True) == (0, 1.0)
    assert retry.after(LOST, 7, grew=False).delay_s is None


@pytest.mark.parametrize(
    ("failure", "tried"),
    [
        (LOST, True),
        (Failure(ErrorCode.ENGINE_UNAVAILABLE, "the job's worker was killed by SIGKILL"), True),
        (Failure(ErrorCode.HUB, "there is no such repository"), False),
        (Failure(ErrorCode.DISK_FULL, "full"), False),
        (Failure(ErrorCode.SHUTTING_DOWN, "told to stop"), False),
    ],
)
def test_only_what_may_be_gone_is_tried_again(failure: Failure, tried: bool) -> None:
    assert (retry.after(failure, 0, grew=True).delay_s is not None) == tried


@given(st.floats(0, 1e6), st.integers(0, 7), st.booleans())
def test_a_hub_that_asks_for_patience_gets_it_within_bounds(asked: float, fruitless: int, grew: bool) -> None:
    failure = Failure(ErrorCode.HUB, "busy", retry_after_s=asked)
    _, delay = retry.after(failure, fruitless, grew=grew)
    assert delay is None or min(asked, 60.0) <= delay <= 60.0


def test_a_try_grows_by_the_count_of_its_stage_alone() -> None:
    growth = retry.Growth("download")
    for stage in (JobStage("check", 0, 9), JobStage("check", 9, 9), JobStage("download", 5, 9)):
        growth.see(stage)
    growth.see(JobStage("download", 3, 9))  # a file was wrong
    growth.see(JobStage("download", 5, 9))
    assert not growth.grew
    growth.see(JobStage("download", 6, 9))
    assert growth.grew
