"""Tone curves: log-probabilities [R, V] to what is drawn from instead of log-probabilities over temperature."""

import mlx.core as mx
import numpy as np

from shared.wire import Curve, Hlg


def shape_hlg(logprobs: mx.array, tone: Hlg, gains: mx.array) -> mx.array:
    """`gains` [R] = 1 / temperature, the slope around the pivot. -inf stays -inf."""
    gain = gains[:, None]
    z = logprobs - (_pivot(logprobs, tone) - tone.offset)
    if tone.width is None:
        return gain * z
    over = mx.maximum(z - tone.width, 0)
    under = mx.maximum(-z - tone.width, 0)
    straight = mx.clip(z, -tone.width, tone.width)
    shoulder = tone.shoulder * mx.log1p(over / tone.shoulder)
    toe = tone.toe * mx.log1p(under / tone.toe)
    return gain * (straight + shoulder - toe)


def _pivot(logprobs: mx.array, tone: Hlg) -> mx.array:
    """[R, 1], before the offset is taken off."""
    if tone.pivot == "top":
        return mx.max(logprobs, axis=-1, keepdims=True)
    if tone.pivot == "entropy":
        terms = mx.where(logprobs > -mx.inf, mx.exp(logprobs) * logprobs, 0)
        return mx.sum(terms, axis=-1, keepdims=True)
    ranked = mx.sort(logprobs, axis=-1)  # ascending
    above = mx.cumsum(mx.exp(ranked), axis=-1, reverse=True)
    place = (
        mx.sum(above >= 0.5 * above[:, :1], axis=-1, keepdims=True) - 1
    )  # half of what XTC and min-p have left
    return mx.take_along_axis(ranked, place, axis=-1)


def shape_curve(logprobs: mx.array, tone: Curve) -> mx.array:
    """The curve at each log-probability; under the lowest point at least as steep as 1, above the last straight on."""
    knots, coefficients = pieces(tone)
    place = mx.zeros(logprobs.shape, dtype=mx.int32)
    for knot in knots:
        place = place + (logprobs >= knot)
    a, b, c, d, origin = (mx.array(coefficients[:, n])[place] for n in range(5))
    t = mx.maximum(logprobs, -1e30) - origin
    value = a + t * (b + t * (c + t * d))
    return mx.where(logprobs > -mx.inf, value, -mx.inf)


def pieces(tone: Curve) -> tuple[list[float], np.ndarray]:
    """-> (knots in nats, rows a, b, c, d, origin of each piece), one piece more than knots: a + b·t + c·t² + d·t³
    with t = logprob - origin. Slopes after Fritsch and Carlson (1980), so that the curve is monotone.
    """
    scale = -tone.floor / 100
    x = np.array([point[0] for point in tone.points]) * scale + tone.floor
    y = np.array([point[1] for point in tone.points]) * scale + tone.floor
    slopes = _monotone_slopes(x, y)
    rows = [[y[0], max(1.0, slopes[0]), 0.0, 0.0, x[0]]]
    for n in range(len(x) - 1):
        h = x[n + 1] - x[n]
        secant = (y[n + 1] - y[n]) / h
        c = (3 * secant - 2 * slopes[n] - slopes[n + 1]) / h
        d = (slopes[n] + slopes[n + 1] - 2 * secant) / (h * h)
        rows.append([y[n], slopes[n], c, d, x[n]])
    rows.append([y[-1], slopes[-1], 0.0, 0.0, x[-1]])
    return [float(knot) for knot in x], np.array(rows, np.float32)


def _monotone_slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    secants = np.diff(y) / np.diff(x)
    slopes = np.concatenate([secants[:1], (secants[:-1] + secants[1:]) / 2, secants[-1:]])
    for n, secant in enumerate(secants):
        if secant == 0:
            slopes[n] = slopes[n + 1] = 0
            continue
        length = float(np.hypot(slopes[n] / secant, slopes[n + 1] / secant))
        if length > 3:
            slopes[n] *= 3 / length
            slopes[n + 1] *= 3 / length
    return slopes
