"""Tone curves against their formulas in numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import Curve, Hlg
from worker.engine.curve import pieces, shape_curve, shape_hlg

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=20)


def logprobs_of(logits: list[float]) -> np.ndarray:
    x = np.array(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def hlg(z: float, gain: float, tone: Hlg) -> float:
    """reference formula: straight within the width, logarithmic beyond it."""
    if tone.width is None or abs(z) <= tone.width:
        return gain * z
    if z > tone.width:
        return gain * (tone.width + tone.shoulder * math.log(1 + (z - tone.width) / tone.shoulder))
    return -gain * (tone.width + tone.toe * math.log(1 + (-z - tone.width) / tone.toe))


def pivot(logprobs: np.ndarray, base: str) -> float:
    p = np.exp(logprobs)
    if base == "top":
        return float(logprobs.max())
    if base == "entropy":
        return float((p * logprobs).sum())
    ranked = np.sort(logprobs)[::-1]
    return float(ranked[np.searchsorted(np.cumsum(np.exp(ranked)), 0.5)])


@settings(max_examples=60)
@given(
    LOGITS,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from(["top", "entropy", "median"]),
    st.sampled_from([None, 0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 2.0, 6.0]),
)
def test_hlg_is_its_formula(logits, temperature, base, width, offset):
    logprobs = logprobs_of(logits)
    if base == "median" and np.any(np.abs(np.cumsum(np.exp(np.sort(logprobs)[::-1])) - 0.5) < 1e-5):
        return
    tone = Hlg(width, 3.0, 5.0, offset, base)
    mu = pivot(logprobs, base) - offset
    expected = [hlg(value - mu, 1 / temperature, tone) for value in logprobs]
    found = shape_hlg(mx.array(logprobs.astype(np.float32))[None], tone, mx.array([1 / temperature]))
    np.testing.assert_allclose(np.array(found)[0], expected, rtol=1e-4, atol=2e-4)


def test_hlg_without_a_width_is_the_temperature():
    logprobs = mx.array(logprobs_of([1.0, 2.0, -3.0]).astype(np.float32))[None]
    shaped = shape_hlg(logprobs, Hlg(width=None), mx.array([2.0]))
    np.testing.assert_allclose(np.array(mx.softmax(shaped)), np.array(mx.softmax(logprobs * 2)), rtol=1e-5)


@pytest.mark.parametrize("tone", [Hlg(), Hlg(pivot="entropy"), Hlg(pivot="median"), Curve()])
def test_what_cannot_be_drawn_stays_so(tone):
    logprobs = mx.array([[-math.inf, -1.2, -2.5, -math.inf]])
    shaped = (
        shape_hlg(logprobs, tone, mx.ones((1,))) if isinstance(tone, Hlg) else shape_curve(logprobs, tone)
    )
    assert np.isneginf(np.array(shaped)[0]).tolist() == [True, False, False, True]


def test_the_identity_curve_changes_nothing():
    logprobs = np.linspace(-60, 0, 200, dtype=np.float32)
    found = np.array(shape_curve(mx.array(logprobs)[None], Curve()))[0]
    np.testing.assert_allclose(found, logprobs, rtol=1e-5, atol=1e-5)


@st.composite
def curves(draw) -> Curve:
    xs = draw(st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True).map(sorted))
    ys = draw(st.lists(st.integers(0, 100), min_size=len(xs), max_size=len(xs)).map(sorted))
    return Curve(tuple((float(x), float(y)) for x, y in zip(xs, ys, strict=True)))


@settings(max_examples=60)
@given(curves())
def test_a_curve_goes_through_its_points_and_never_falls(tone):
    points = np.array(tone.points) * 0.2 - 20
    through = np.array(shape_curve(mx.array(points[:, 0].astype(np.float32))[None], tone))[0]
    np.testing.assert_allclose(through, points[:, 1], atol=2e-3)
    found = np.array(shape_curve(mx.linspace(-40, 0, 2000)[None], tone))[0]
    assert np.all(np.diff(found) > -1e-3)
    _, coefficients = pieces(tone)
    assert coefficients[0, 1] >= 1


def test_a_curve_with_a_flat_part_by_hand():
    """Points at -20, -10 and 0 nats with values -20, -10 and -10: Fritsch and Carlson make both ends of it flat."""
    tone = Curve(((0.0, 0.0), (50.0, 50.0), (100.0, 50.0)))
    found = np.array(shape_curve(mx.array([[-30.0, -20.0, -15.0, -10.0, -5.0, 0.0]]), tone))[0]
    np.testing.assert_allclose(found, [-30, -20, -13.75, -10, -10, -10], atol=1e-5)
