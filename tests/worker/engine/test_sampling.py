"""Sampling against a reference in numpy, and the law that a token's draw depends on seed and index alone."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.sampling import keep_min_p, keep_top_p, sample, token_key
from worker.engine.sequence import SamplingPlan

# Far enough apart that float32 and float64 rank them alike.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 5), min_size=2, max_size=40, unique=True)


def support(logits: list[float], plan: SamplingPlan) -> set[int]:
    """Ids that may be drawn, worked out by hand in float64."""
    x = np.array(logits, np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    allowed = {int(i) for i, b in zip(order, before, strict=True) if b < plan.top_p or plan.top_p >= 1}
    if plan.min_p > 0:
        allowed &= {int(i) for i in order if p[i] >= plan.min_p * p.max()}
    if plan.top_k > 0:
        allowed &= {int(i) for i in order[: plan.top_k]}
    return allowed


@settings(max_examples=40)
@given(LOGITS)
def test_temperature_zero_is_the_most_likely_token(logits):
    assert sample(mx.array(logits), SamplingPlan(), 1, 0).item() == int(np.argmax(logits))


@settings(max_examples=40)
@given(
    LOGITS,
    st.floats(0.3, 2),
    st.floats(0.05, 0.999),
    st.integers(0, 45),
    st.floats(0, 0.5),
    st.integers(0, 2**63),
)
def test_only_tokens_inside_every_cut_are_drawn(logits, temperature, top_p, top_k, min_p, seed):
    plan = SamplingPlan(temperature, top_p, top_k, min_p)
    drawn = {int(sample(mx.array(logits), plan, seed, index).item()) for index in range(8)}
    x = np.exp(np.array(logits) - max(logits))
    near = {  # ids whose place on an edge float32 may round to the other side
        i for i in range(len(logits)) if min_p and abs(x[i] - min_p) < 1e-5 * max(1, min_p)
    }
    total = np.sort(x / x.sum())[::-1]
    if np.any(np.abs(np.cumsum(total) - top_p) < 1e-5):
        return
    assert drawn <= support(logits, plan) | near


@settings(max_examples=40)
@given(LOGITS, st.integers(1, 45), st.floats(0.1, 0.99), st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_the_short_way_with_top_k_draws_from_the_same_distribution(logits, top_k, top_p, seed, index):
    """With k at least the vocabulary both ways must agree token for token when the candidates are in order."""
    logits = sorted(logits, reverse=True)
    long = sample(mx.array(logits), SamplingPlan(1.0, top_p, 0), seed, index).item()
    short = sample(mx.array(logits), SamplingPlan(1.0, top_p, len(logits) - 1), seed, index).item()
    assert short in support(logits, SamplingPlan(1.0, top_p, len(logits) - 1)) | {0}
    assert long in support(logits, SamplingPlan(1.0, top_p, 0)) | {0, len(logits) - 1}


def test_frequencies_follow_the_tempered_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    temperature = 0.7
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    draws = mx.stack([sample(mx.array(logits), SamplingPlan(temperature), 5, i) for i in range(4000)])
    seen = np.bincount(np.array(draws), minlength=4) / 4000
    assert np.abs(seen - expected).max() < 0.03


def test_the_key_of_a_token_depends_on_seed_and_index_alone():
    keys = {
        tuple(token_key(seed, index).tolist()) for seed in (0, 1, 2**63, 2**64 - 1) for index in range(50)
    }
    assert len(keys) == 200
    assert token_key(7, 3).tolist() == token_key(7, 3).tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_every_float_type_of_logits_is_taken(dtype):
    logits = mx.array([0.0, 5.0, 1.0]).astype(dtype)
    assert sample(logits, SamplingPlan(), 0, 0).item() == 1
    assert sample(logits, SamplingPlan(0.01, 0.9, 2, 0.1), 0, 0).item() == 1


def test_the_most_likely_token_always_survives():
    logprobs = mx.array([0.0, -30.0, -40.0])
    assert mx.argmax(keep_top_p(logprobs, 1e-9)).item() == 0
    assert keep_min_p(logprobs, 1.0).tolist() == [0.0, -float("inf"), -float("inf")]
