"""Who gets how many bits, on tables made up: never more than there is, floors, and what is worth most first."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.quantize.allocate import FLOOR, MAX_LOW_RUN, Choice, OutOfReach, allocate, hull

BITS = (3, 4, 6, 8)


def sizes(params: int = 800, bits: tuple[int, ...] = BITS) -> dict[int, int]:
    return {one: params * one // 8 for one in bits}


def falling(worst: float, bits: tuple[int, ...] = BITS) -> dict[int, float]:
    """Divergence as it mostly is: a quarter for each bit."""
    return {one: worst * 4.0 ** -(one - min(bits)) for one in bits}


def model(seed: int, layers: int = 6) -> list[Choice]:
    one = random.Random(seed)
    found = [Choice("embed", sizes(4000), falling(one.random()), is_protected=True)]
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
            params = 80 * one.randint(1, 20)
            found.append(
                Choice(f"{layer}.{name}", sizes(params), falling(one.random()), layer, name[1:] == "_proj")
            )
    return found


def taken(choices: list[Choice], bits: dict[str, int]) -> int:
    return sum(one.sizes[bits[one.module]] for one in choices)


def lost(choices: list[Choice], bits: dict[str, int]) -> float:
    return sum(one.divergences[bits[one.module]] for one in choices)


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_never_more_than_there_is_and_never_much_less(seed: int, share: float) -> None:
    choices = model(seed)
    least, most = (sum(end(one.sizes.values()) for one in choices) for end in (min, max))
    budget = least + share * (most - least)
    bits = allocate(choices, budget)
    assert set(bits) == {one.module for one in choices}
    assert taken(choices, bits) <= budget
    step = max(one.sizes[8] - one.sizes[3] for one in choices)
    assert taken(choices, bits) > budget - step or all(value == 8 for value in bits.values())


def test_more_room_never_loses_more() -> None:
    choices = model(7)
    least, most = (sum(end(one.sizes.values()) for one in choices) for end in (min, max))
    found = [lost(choices, allocate(choices, least + (most - least) * step / 10)) for step in range(11)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 10 * found[5] > 0


def test_what_matters_gets_more_and_what_costs_less_too() -> None:
    plain = [Choice(name, sizes(), falling(0.1)) for name in "abc"]
    fragile = Choice("fragile", sizes(), falling(5.0))
    small = Choice("small", sizes(80), falling(0.1))
    bits = allocate([*plain, fragile, small], taken(plain, dict.fromkeys("abc", 3)) + 300 + 80 + 340)
    assert bits["fragile"] > max(bits[name] for name in "abc")
    assert bits["small"] > max(bits[name] for name in "abc")


def test_where_calibration_may_mislead_a_divergence_counts_more() -> None:
    one, other = Choice("a", sizes(), falling(0.1)), Choice("b", sizes(), falling(0.15))
    room = one.sizes[3] + other.sizes[3] + 100
    assert allocate([one, other], room) == {"a": 3, "b": 4}
    guarded = Choice("a", sizes(), falling(0.1), is_protected=True)
    assert allocate([guarded, other], room) == {"a": 4, "b": 3}


def test_a_step_that_pays_only_later_is_seen() -> None:
    """Nothing is gained at 4 bits and all of it at 6."""
    late = Choice("late", sizes(), {3: 1.0, 4: 1.0, 6: 0.0, 8: 0.0})
    other = Choice("other", sizes(), falling(0.2))
    assert hull(late) == ({3: 1.0, 4: 1.0, 6: 0.0, 8: 0.0}, [3, 6, 8])
    assert allocate([late, other], late.sizes[6] + other.sizes[3]) == {"late": 6, "other": 3}


def test_a_step_that_does_not_fit_is_taken_in_part() -> None:
    late = Choice("late", sizes(), {3: 1.0, 4: 0.9, 6: 0.0, 8: 0.0})
    assert hull(late)[1] == [3, 6, 8]
    assert allocate([late], late.sizes[4] + 50) == {"late": 4}


def test_what_is_no_number_counts_as_much_worse_than_the_worst_number() -> None:
    curve, _ = hull(Choice("a", sizes(), {3: float("inf"), 4: 0.5, 6: 0.7, 8: float("nan")}))
    assert curve == {3: 7.0, 4: 0.5, 6: 0.5, 8: 0.5}


def low_layers(choices: list[Choice], bits: dict[str, int]) -> list[bool]:
    layers = sorted({one.layer for one in choices if one.layer is not None})
    return [all(bits[one.module] == 3 for one in choices if one.layer == layer) for layer in layers]


def test_each_layer_has_modules_above_the_least_of_attention_where_there_are_many() -> None:
    """Though all that matters is in one layer."""
    choices = [
        Choice(one.module, one.sizes, falling(9.0 if one.layer == 0 else 1e-6), one.layer, one.is_attention)
        for one in model(3)
    ]
    least = sum(one.sizes[3] for one in choices)
    bits = allocate(choices, least * 1.3)
    for layer in range(6):
        above = [one for one in choices if one.layer == layer and bits[one.module] > 3]
        assert sum(one.is_attention for one in above) >= FLOOR


def test_no_long_run_of_layers_stays_at_the_least_where_floors_do_not_fit() -> None:
    choices = [
        Choice(f"{layer}.{name}", sizes(), falling(5.0 if layer == 0 else 0.01), layer)
        for layer in range(12)
        for name in "ab"
    ]
    bits = allocate(choices, sum(one.sizes[3] for one in choices) + 3 * 100 + 50)
    lows = low_layers(choices, bits)
    assert lows == [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3 + [False]
    assert MAX_LOW_RUN == 3


def test_what_cannot_be_reached_is_said_with_the_ends() -> None:
    choices = model(1)
    least, most = (sum(end(one.sizes.values()) for one in choices) for end in (min, max))
    for budget in (least - 1, most + 1):
        with pytest.raises(OutOfReach) as reach:
            allocate(choices, budget)
        assert (reach.value.least, reach.value.most) == (least, most)
    assert set(allocate(choices, least).values()) == {3}
    assert set(allocate(choices, most).values()) == {8}
