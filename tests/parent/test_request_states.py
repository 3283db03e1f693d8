"""Table R, the kept ids, and the quarantine: no event of an answer is lost or doubled, whatever dies when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.inference.forward import Kept
from parent.inference.quarantine import MAX_ENTRIES, REMEMBER_S, Quarantine, request_hash
from parent.inference.states import TABLE, TERMINAL, Event, IllegalTransition, State, advance, markdown
from shared import wire


def test_every_state_is_reached_and_every_one_that_is_not_terminal_leads_on() -> None:
    reached = {row.target for rows in TABLE.values() for row in rows} | {State.RECEIVED}
    assert reached == set(State)
    assert {state for state, _ in TABLE} == set(State) - TERMINAL


def test_a_client_that_leaves_ends_a_request_in_every_state() -> None:
    assert all(advance(state, Event.GONE) is State.CANCELLED for state in set(State) - TERMINAL)


@pytest.mark.parametrize("state", [State.GRANTED, State.STREAMING])
def test_the_first_loss_queues_again_the_second_fails(state: State) -> None:
    assert advance(state, Event.LOST, first_loss=True) is State.QUEUED
    assert advance(state, Event.LOST, first_loss=False) is State.FAILED


@given(st.lists(st.sampled_from(Event)))
def test_any_walk_ends_in_a_terminal_state_or_can(events: list[Event]) -> None:
    state, losses = State.RECEIVED, 0
    for event in events:
        try:
            state = advance(state, event, first_loss=losses == 0)
        except IllegalTransition:
            continue
        losses += event is Event.LOST
        if state in TERMINAL:
            assert all((state, any_event) not in TABLE for any_event in Event)
            return
    assert advance(state, Event.GONE) in TERMINAL


def test_the_printed_table_names_every_transition() -> None:
    assert len(markdown().splitlines()) == 2 + sum(len(rows) for rows in TABLE.values())


# ---------------------------------------------------------------- kept ids


class Engine:
    """An oracle: token n says `f"{n},"`; some tokens are held back and come with a later one."""

    def __init__(self, length: int, held: set[int]) -> None:
        self.length = length
        self.held = held

    def events(self, resume: list[int]) -> list[wire.Event]:
        told: list[wire.Event] = [wire.Started(1)]
        text, ids = "", []
        for token in range(len(resume), self.length):
            text += f"{token},"
            ids.append(token)
            if token not in self.held:
                told.append(wire.Text(text, ids))
                text, ids = "", []
            elif token % 2:  # text that leaves before its ids are sure
                told.append(wire.Text(text, []))
                text = ""
        if text or ids:
            told.append(wire.Text(text, ids))
        return [*told, wire.Finish("stop", wire.Usage(1, self.length))]


@given(
    length=st.integers(0, 30),
    held=st.sets(st.integers(0, 30)),
    cut=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_whatever_the_cut_and_the_batches_the_text_is_that_of_an_uninterrupted_run(
    length: int, held: set[int], cut: int, sizes: list[int]
) -> None:
    engine, kept = Engine(length, held), Kept()
    left: list[wire.Event] = []

    def run(events: list[wire.Event]) -> None:
        sizes_left = list(sizes)
        while events:
            size = sizes_left.pop(0) if sizes_left else 1
            left.extend(kept.take(events[:size]))
            events = events[size:]

    first = engine.events([])
    run(first[:cut])
    if cut < len(first):
        said = "".join(event.text for event in left if isinstance(event, wire.Text))
        assert said == "".join(f"{token}," for token in kept.ids)  # what has left matches the ids
        kept.begin_again()
        run(engine.events(kept.ids))
    text = "".join(event.text for event in left if isinstance(event, wire.Text))
    assert text == "".join(f"{token}," for token in range(length))
    assert [type(event) for event in left].count(wire.Finish) == 1
    assert isinstance(left[-1], wire.Finish)


# ---------------------------------------------------------------- quarantine


def request(text: str, **fields: object) -> wire.GenerateRequest:
    return wire.GenerateRequest(request_id="r", prompt=wire.TextPrompt(text), seed=1, **fields)  # type: ignore[arg-type]


def test_two_deaths_hold_a_request_until_it_is_released_one_does_not() -> None:
    quarantine, key = Quarantine(), request_hash(request("x"), "m")
    quarantine.death(key, "w-1", 0.0, "m")
    assert not quarantine.holds(key)
    assert not quarantine.release(key)
    quarantine.death(key, "w-2", 10.0, "m")
    assert quarantine.holds(key)
    assert [(held, case.model) for held, case in quarantine.held()] == [(key, "m")]
    assert quarantine.release(key)
    assert not quarantine.holds(key)
    assert quarantine.held() == []


def test_one_death_counts_once_however_many_equal_requests_were_there() -> None:
    quarantine, key = Quarantine(), request_hash(request("x"), "m")
    for _ in range(3):
        quarantine.death(key, "w-1", 0.0)
    assert not quarantine.holds(key)


def test_one_death_is_forgotten_after_a_while_two_are_not() -> None:
    quarantine, key = Quarantine(), request_hash(request("x"), "m")
    quarantine.death(key, "w-1", 0.0)
    quarantine.death(key, "w-2", REMEMBER_S + 1)
    assert not quarantine.holds(key)
    quarantine.death(key, "w-3", REMEMBER_S + 2)
    quarantine.death(key, "w-4", 10 * REMEMBER_S)
    assert quarantine.holds(key)


def test_an_answer_clears_the_request() -> None:
    quarantine, key = Quarantine(), request_hash(request("x"), "m")
    quarantine.death(key, "w-1", 0.0)
    quarantine.survived(key)
    quarantine.death(key, "w-2", 1.0)
    assert not quarantine.holds(key)


def test_requests_are_the_same_by_what_the_model_sees() -> None:
    base = request_hash(request("x"), "m")
    again = wire.GenerateRequest(request_id="q", prompt=wire.TextPrompt("x"), seed=99)
    assert request_hash(again, "m") == base
    assert request_hash(again, "other") != base
    assert request_hash(request("y"), "m") != base
    assert request_hash(request("x", max_tokens=5), "m") != base


def test_the_memory_of_deaths_is_bounded() -> None:
    quarantine = Quarantine()
    for number in range(MAX_ENTRIES + 10):
        quarantine.death(number.to_bytes(16, "big"), "w-1", 0.0)
    first = (0).to_bytes(16, "big")
    quarantine.death(first, "w-2", 0.0)
    assert not quarantine.holds(first)
