"""Bias, penalties and masks against a reference in numpy, for rows of every kind together."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.rows import row
from worker.engine.processors import (
    Recent,
    add_bias,
    keep_allowed,
    newest,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
)
from worker.engine.sampling import process, stages
from worker.engine.sequence import SamplingPlan, Sequence

SIZE = 12
TOKENS = st.integers(0, SIZE - 1)
PENALTY = st.sampled_from([-1.5, -0.25, 0.5, 2.0])


@st.composite
def rows(draw, plans) -> list[Sequence]:
    made = []
    for _ in range(draw(st.integers(1, 4))):
        answer = draw(st.lists(TOKENS, max_size=30))
        prompt = draw(st.lists(TOKENS, min_size=1, max_size=30))
        unread = bool(answer) and draw(st.booleans())
        made.append(row(draw(plans), prompt=prompt, answer=answer, unread=unread))
    return made


def said(one: Sequence) -> list[int]:
    """Prompt and answer, with the token that is on the device only."""
    whole = [*one.prompt, *one.generated]
    if not one.is_read:
        tokens, place = one.token
        whole.append(tokens[place].item())
    return whole


def window(one: Sequence, size: int) -> list[int]:
    return said(one)[-size:] if size else said(one)


def logits_for(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (count, SIZE)).astype(np.float32)


def expected(one: Sequence, logits: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """The documented order, one row, one token at a time, in float64."""
    plan, x = one.sampling, logits.astype(np.float64)
    for token, value in plan.logit_bias:
        x[token] += value
    for token in set(window(one, plan.repetition_window)):
        x[token] = x[token] / plan.repetition_penalty if x[token] > 0 else x[token] * plan.repetition_penalty
    for token in set(window(one, plan.presence_window)):
        x[token] -= plan.presence_penalty
    for token in window(one, plan.frequency_window):
        x[token] -= plan.frequency_penalty
    return x if allowed is None else np.where(allowed, x, -np.inf)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 99))
def test_recent_tokens_are_the_newest_of_prompt_and_answer_read_or_not(data, seed):
    several = data.draw(rows(st.just(SamplingPlan())))
    sizes = [data.draw(st.sampled_from([0, 1, 2, 5, 20])) for _ in several]
    recent = Recent(several, sizes)
    ids, counts = np.array(recent.ids), np.array(recent.counts)
    for n, (one, size) in enumerate(zip(several, sizes, strict=True)):
        assert sorted(ids[n][counts[n] > 0]) == sorted(window(one, size))
        assert set(ids[n]) == set(window(one, size))
    assert newest(several).tolist() == [said(one)[-1] for one in several]


@settings(max_examples=40)
@given(
    st.data(), st.integers(0, 99), st.lists(PENALTY, min_size=4, max_size=4), st.sampled_from([0, 1, 3, 20])
)
def test_each_penalty_is_that_of_the_reference(data, seed, by, size):
    several = data.draw(rows(st.just(SamplingPlan())))
    logits = logits_for(len(several), seed)
    by = by[: len(several)]
    recent = Recent(several, [size] * len(several))
    factors = [abs(value) + 0.1 for value in by]
    found = {
        "repetition_penalty": penalize_repetition(mx.array(logits), recent, mx.array(factors)),
        "presence_penalty": penalize_presence(mx.array(logits), recent, mx.array(by)),
        "frequency_penalty": penalize_frequency(mx.array(logits), recent, mx.array(by)),
    }
    for name, result in found.items():
        for n, one in enumerate(several):
            value = factors[n] if name.startswith("repetition") else by[n]
            options = {name: value, name.replace("penalty", "window"): size}
            one.sampling = SamplingPlan(**options)
            np.testing.assert_allclose(np.array(result[n]), expected(one, logits[n]), rtol=1e-5, atol=1e-5)


def test_penalties_by_hand():
    """Tokens 1 and 2 in the window, 1 twice; logits 2, 2, -2, 4."""
    one = row(SamplingPlan(), prompt=[3, 1, 2], answer=[1], unread=True)
    logits = mx.array([[2.0, 2.0, -2.0, 4.0]])
    recent = Recent([one], [3])
    assert penalize_repetition(logits, recent, mx.array([2.0])).tolist() == [[2.0, 1.0, -4.0, 4.0]]
    assert penalize_presence(logits, recent, mx.array([0.5])).tolist() == [[2.0, 1.5, -2.5, 4.0]]
    assert penalize_frequency(logits, recent, mx.array([0.5])).tolist() == [[2.0, 1.0, -2.5, 4.0]]
    everything = Recent([one], [0])
    assert penalize_presence(logits, everything, mx.array([0.5])).tolist() == [[2.0, 1.5, -2.5, 3.5]]


def test_bias_is_added_to_its_tokens_alone():
    biases = [((0, 1.5), (3, -100.0)), (), ((1, 0.25),)]
    result = add_bias(mx.zeros((3, 4)), biases)
    assert result.tolist() == [[1.5, 0, 0, -100], [0, 0, 0, 0], [0, 0.25, 0, 0]]


def test_a_mask_leaves_what_is_allowed():
    allowed = np.array([[True, False, True], [False, False, True]])
    inf = float("inf")
    assert keep_allowed(mx.ones((2, 3)), allowed).tolist() == [[1, -inf, 1], [-inf, -inf, 1]]


PLANS = st.builds(
    SamplingPlan,
    repetition_penalty=st.sampled_from([0.5, 1.1, 2.0]),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_window=st.sampled_from([0, 1, 4, 20]),
    presence_window=st.sampled_from([0, 2, 20]),
    frequency_window=st.sampled_from([0, 3, 20]),
    logit_bias=st.lists(
        st.tuples(TOKENS, st.sampled_from([-100.0, -1.0, 5.0])),
        min_size=1,
        max_size=4,
        unique_by=lambda b: b[0],
    ).map(tuple),
)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 99))
def test_all_together_come_in_the_documented_order_and_a_row_alone_gets_the_same_bits(data, seed):
    several = data.draw(rows(PLANS))
    logits = logits_for(len(several), seed)
    allowed = np.random.default_rng(seed + 1).random((len(several), SIZE)) < 0.7
    key = stages(several[0].sampling, SIZE, masked=True)
    together = np.array(process(mx.array(logits), several, key, allowed))
    for n, one in enumerate(several):
        np.testing.assert_allclose(together[n], expected(one, logits[n], allowed[n]), rtol=1e-4, atol=1e-4)
        alone = process(mx.array(logits[n : n + 1]), [one], key, allowed[n : n + 1])
        assert np.array_equal(np.array(alone)[0], together[n])


@pytest.mark.parametrize("size", [0, 1, 2, 20])
def test_a_resumed_row_has_the_window_of_one_that_was_never_lost(size):
    whole = row(SamplingPlan(), prompt=[1, 2, 3], answer=[4, 5, 6, 4], unread=True)
    again = row(SamplingPlan(), prompt=[1, 2, 3, 4, 5, 6, 4], index=4)
    for one in (whole, again):
        recent = Recent([one], [size])
        counted = np.array(recent.ids)[np.array(recent.counts) > 0]
        assert sorted(counted) == sorted([1, 2, 3, 4, 5, 6, 4][-size:])
