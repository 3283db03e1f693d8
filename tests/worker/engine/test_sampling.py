"""Sampling against a reference in numpy, and the law that a token's draw depends on seed and index alone."""

import io

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import Curve, Hlg
from tests.worker.engine.rows import row
from worker.engine.sampling import BAD, draw, exclude_top, keep_min_p, keep_top_p, token_keys
from worker.engine.sequence import SamplingPlan

# Far enough apart that float32 and float64 rank them alike.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 5), min_size=2, max_size=40, unique=True)
INF = float("inf")


def one(logits: list[float], plan: SamplingPlan, seed: int = 0, index: int = 0) -> int:
    return draw(mx.array([logits]), [row(plan, seed=seed, index=index)]).tokens.item()


def many(logits: list[float], plan: SamplingPlan, count: int, seed: int = 0) -> list[int]:
    """Answer tokens 0 to count - 1, in one batch."""
    block = mx.broadcast_to(mx.array([logits]), (count, len(logits)))
    return draw(block, [row(plan, seed=seed, index=n) for n in range(count)]).tokens.tolist()


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def support(logits: list[float], plan: SamplingPlan, *, strikes: bool = False) -> set[int]:
    """Ids that may be drawn, worked out in float64 in the documented order."""
    x = np.array(logits, np.float64)
    order = [int(i) for i in np.argsort(-x)]
    p = softmax(x)
    if plan.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        order = [i for i, b in zip(order, before, strict=True) if b < plan.top_p]
    if plan.min_p > 0:
        order = [i for i in order if p[i] >= plan.min_p * p.max()]
    if strikes:
        left = p / p[order].sum()
        above = [i for i in order if left[i] > plan.xtc_threshold]
        order = [i for i in order if i not in above[:-1] or i in plan.xtc_keep]
    return set(order[: plan.top_k] if plan.top_k else order)


def is_on_an_edge(logits: list[float], plan: SamplingPlan) -> bool:
    """Whether float32 may come down on the other side of a cut."""
    p = softmax(np.array(logits, np.float64))
    sums = np.cumsum(np.sort(p)[::-1])
    near_min_p = np.abs(p / p.max() - plan.min_p) < 1e-5
    return bool(np.any(np.abs(sums - plan.top_p) < 1e-5) or np.any(near_min_p))


@settings(max_examples=40)
@given(LOGITS)
def test_temperature_zero_is_the_most_likely_token(logits):
    assert one(logits, SamplingPlan()) == int(np.argmax(logits))


@settings(max_examples=60)
@given(
    LOGITS,
    st.floats(0.3, 3),
    st.floats(0.05, 1),
    st.integers(0, 45),
    st.floats(0, 0.5),
    st.integers(0, 2**63),
)
def test_only_tokens_inside_every_cut_are_drawn(logits, temperature, top_p, top_k, min_p, seed):
    plan = SamplingPlan(temperature, top_p, top_k, min_p)
    if not is_on_an_edge(logits, plan):
        assert set(many(logits, plan, 16, seed)) <= support(logits, plan)


@settings(max_examples=40)
@given(LOGITS, st.floats(0.05, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p):
    plan = SamplingPlan(1.0, top_p)
    if is_on_an_edge(logits, plan):
        return
    logprobs = np.log(softmax(np.array(logits, np.float64))).astype(np.float32)
    kept = np.array(keep_top_p(mx.array(logprobs)[None], mx.array([top_p])))[0]
    assert {int(i) for i in np.nonzero(kept > -INF)[0]} == support(logits, plan)
    assert np.array_equal(kept[kept > -INF], logprobs[kept > -INF])


@pytest.mark.parametrize(
    ("threshold", "keep", "gone"),
    [
        (0.1, (), {0, 1}),
        (0.35, (), set()),
        (0.25, (), {0}),
        (0.1, (0,), {1}),
        (0.1, (1, 3), {0}),
        (0.0, (), {0, 1, 2}),
    ],
)
def test_xtc_takes_away_all_but_the_least_likely_above_its_threshold(threshold, keep, gone):
    logprobs = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    plan = SamplingPlan(1.0, xtc_probability=0.5, xtc_threshold=threshold + 1e-4, xtc_keep=keep)
    if threshold == 0.0:
        plan = SamplingPlan(1.0, xtc_probability=0.5, xtc_threshold=0.0)
    struck = np.array(exclude_top(logprobs, [plan], mx.array([0.49])))[0]
    assert {int(i) for i in np.nonzero(struck == -INF)[0]} == gone
    spared = np.array(exclude_top(logprobs, [plan], mx.array([0.51])))[0]
    assert not np.any(spared == -INF)


def test_xtc_rows_with_different_ids_to_keep_do_not_touch_each_other():
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.2]] * 3))
    plans = [SamplingPlan(xtc_probability=1, xtc_keep=keep) for keep in ((), (1,), (0, 2))]
    gone = np.array(exclude_top(logprobs, plans, mx.zeros((3,)))) == -INF
    assert gone.tolist() == [[True, True, False], [True, False, False], [False, True, False]]


@settings(max_examples=30)
@given(LOGITS, st.sampled_from([0, 2, 5]), st.sampled_from([0.5, 1.0]), st.integers(0, 99))
def test_xtc_in_the_chain_strikes_as_often_as_it_should(logits, top_k, top_p, seed):
    always = SamplingPlan(1.0, top_p, top_k, xtc_probability=1.0, xtc_threshold=0.123)
    p = softmax(np.array(logits, np.float64))
    if not is_on_an_edge(logits, always) and not np.any(np.abs(p - 0.123) < 1e-3):
        assert set(many(logits, always, 16, seed)) <= support(logits, always, strikes=True)


def test_xtc_with_a_probability_strikes_in_that_share():
    plan = SamplingPlan(1e-3, xtc_probability=0.3, xtc_threshold=0.1)
    drawn = many([2.0, 1.5, -9.0], plan, 3000)
    assert set(drawn) == {0, 1}
    assert abs(drawn.count(1) / 3000 - 0.3) < 0.03


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (SamplingPlan(0.7), {0, 1, 2, 3}),
        (SamplingPlan(0.7, top_k=4), {0, 1, 2, 3}),
        (SamplingPlan(1.3, top_p=0.8), {0, 1}),
        (SamplingPlan(1.3, min_p=0.1), {0, 1, 2}),
        (SamplingPlan(1.3, top_p=0.99, top_k=2, min_p=0.01), {0, 1}),
    ],
)
def test_frequencies_follow_the_tempered_softmax_of_what_is_kept(plan, kept):
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    expected = softmax(np.where([i in kept for i in range(4)], logits / plan.temperature, -INF))
    seen = np.bincount(many(logits.tolist(), plan, 6000, seed=5), minlength=4) / 6000
    assert np.abs(seen - expected).max() < 0.025


PLANS = st.builds(
    SamplingPlan,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.6, 1.0]),
    top_k=st.sampled_from([0, 3, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    xtc_keep=st.sampled_from([(), (1, 2)]),
    logit_bias=st.sampled_from([(), ((1, 2.0),), ((0, -1.0), (5, 1.0))]),
    tone=st.sampled_from(
        [None, None, None, Hlg(), Hlg(pivot="median"), Curve(((0, 0), (60, 40), (100, 100)))]
    ),
    logprobs=st.sampled_from([None, None, 0, 4]),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(PLANS, st.integers(0, 2**64 - 1), st.integers(0, 999)), min_size=1, max_size=6),
    st.data(),
)
def test_a_row_draws_the_same_alone_and_in_any_company(wanted, data):
    logits = mx.array(np.random.default_rng(len(wanted)).normal(0, 2, (len(wanted), 12)).astype(np.float32))
    rows = [row(plan, prompt=[1, 2, 3], seed=seed, index=index) for plan, seed, index in wanted]
    allowed = {n: np.arange(12) % 3 != n % 3 for n in range(len(rows)) if data.draw(st.booleans())}
    together = draw(logits, rows, allowed)
    told = {place: n for told in together.told for n, place in enumerate(told.places)}
    assert set(told) == {n for n, one in enumerate(rows) if one.sampling.logprobs is not None}
    for n, member in enumerate(rows):
        alone = draw(logits[n : n + 1], [member], {0: allowed[n]} if n in allowed else None)
        assert alone.tokens.item() == together.tokens[n].item()
        if n in allowed:
            assert allowed[n][alone.tokens.item()]


def test_a_token_depends_on_seed_and_index_alone():
    rows = [row(SamplingPlan(), seed=seed, index=i) for seed in (0, 1, 2**63, 2**64 - 1) for i in range(50)]
    keys = token_keys(rows).tolist()
    assert len({tuple(key) for key in keys}) == 200
    resumed = row(SamplingPlan(), seed=1, index=3)
    going = row(SamplingPlan(), seed=1, answer=[4, 5, 6], unread=True)
    assert token_keys([resumed]).tolist() == token_keys([going]).tolist() == [keys[53]]
    assert mx.random.key(keys[53][0] << 32 | keys[53][1]).tolist() == keys[53]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_every_float_type_of_logits_is_taken(dtype):
    logits = mx.array([[0.0, 5.0, 1.0]]).astype(dtype)
    for plan in (SamplingPlan(), SamplingPlan(0.01, 0.9, 2, 0.1), SamplingPlan(0.01, repetition_penalty=1.1)):
        assert draw(logits, [row(plan)]).tokens.tolist() == [1]


def test_the_most_likely_token_always_survives():
    logprobs = mx.array([[0.0, -30.0, -40.0]])
    assert keep_top_p(logprobs, mx.array([1e-6])).tolist() == [[0.0, -INF, -INF]]
    assert keep_min_p(logprobs, mx.array([1.0])).tolist() == [[0.0, -INF, -INF]]


EVERY_WAY = [
    SamplingPlan(),
    SamplingPlan(logprobs=3),
    SamplingPlan(1.0),
    SamplingPlan(1.0, 0.9),
    SamplingPlan(1.0, 0.9, 5, 0.1),
    SamplingPlan(1.0, 1.0, 5, xtc_probability=0.5),
    SamplingPlan(0.7, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias=((1, 1.0),), logprobs=0),
    SamplingPlan(0.7, tone=Hlg()),
    SamplingPlan(0.7, tone=Curve()),
]


@pytest.mark.parametrize("plan", EVERY_WAY)
@pytest.mark.parametrize("size", [7, 1000, 50_000])
def test_rows_without_numbers_are_bad_and_their_neighbours_are_not(plan, size):
    good = np.random.default_rng(1).normal(size=size).astype(np.float32)
    several = np.stack([good] * 7)
    several[0] = np.nan
    for place, at in ((1, 0), (2, size // 2), (3, size - 1)):
        several[place, at] = np.nan
    several[4] = -np.inf
    several[5, 3] = np.inf
    if plan == SamplingPlan() and mx.default_device() != mx.Device(mx.cpu):
        several[1:4] = np.nan  # a GPU's argmax passes over single ones
    drawn = draw(mx.array(several), [row(plan, seed=9) for _ in several]).tokens.tolist()
    assert drawn[:6] == [BAD] * 6
    assert drawn[6] == draw(mx.array(several[6:]), [row(plan, seed=9)]).tokens.item() != BAD


def test_logprobs_are_those_after_penalties_and_before_cuts():
    plan = SamplingPlan(0.5, top_k=1, min_p=0.9, logit_bias=((2, 3.0),), presence_penalty=1.0, logprobs=2)
    logits = [0.0, 4.0, 1.0, -2.0]
    result = draw(mx.array([logits]), [row(plan, prompt=[1])])
    expected = np.log(softmax(np.array([0.0, 3.0, 4.0, -2.0])))
    [told] = result.told
    assert result.tokens.tolist() == [2]
    assert told.ids.tolist() == [[2, 1]]
    np.testing.assert_allclose(told.drawn.tolist(), expected[[2]], rtol=1e-5)
    np.testing.assert_allclose(told.values.tolist(), [expected[[2, 1]]], rtol=1e-5)


def test_greedy_rows_run_one_argmax_and_nothing_else_over_the_vocabulary():
    """As the graph says."""
    logits = mx.zeros((3, 1000))
    tokens = draw(logits, [row(SamplingPlan()) for _ in range(3)]).tokens
    text = io.StringIO()
    mx.export_to_dot(text, tokens)
    labels = [line for line in text.getvalue().splitlines() if "label" in line]
    assert sum("ArgReduce" in line for line in labels) == 1
    assert not any(
        word in line for line in labels for word in ("Sort", "Partition", "LogSumExp", "Random", "Exp")
    )
