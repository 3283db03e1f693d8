"""Numbers of each position, in float32: how unlikely the next token was, and how far two models are apart."""

import math
from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np


def surprise(logits: mx.array, targets: mx.array) -> mx.array:
    """-log p of each target [N], from logits [N, V]."""
    logits = logits.astype(mx.float32)
    wanted = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - wanted


def log_probabilities(logits: mx.array) -> mx.array:
    """Of every token [N, V], in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergence(reference: mx.array, candidate: mx.array) -> mx.array:
    """KL(reference || candidate) of each position [N] in nats, from log-probabilities [N, V]; 0 or more but for
    rounding.
    """
    return (mx.exp(reference) * (reference - candidate)).sum(axis=-1)


class Perplexity(msgspec.Struct, frozen=True):
    """`value` is exp of the mean surprise of `tokens` tokens, `error` its standard error (by the delta method)."""

    value: float
    error: float
    tokens: int


class Divergence(msgspec.Struct, frozen=True):
    """KL in nats over `positions` positions. `same_top`: the share of them where both find the same token likeliest."""

    mean: float
    median: float
    p95: float
    same_top: float
    positions: int


def perplexity(surprises: Sequence[float]) -> Perplexity:
    """Of the surprise of every token."""
    each = np.asarray(surprises, np.float64)
    value = math.exp(min(float(each.mean()), 700.0))
    error = value * float(each.std(ddof=1)) / math.sqrt(each.size) if each.size > 1 else 0.0
    return Perplexity(value, error, int(each.size))


def summary(divergences: Sequence[float], same: int) -> Divergence:
    """Of the divergence at every position, of which `same` have the same likeliest token."""
    each = np.asarray(divergences, np.float64)
    median, p95 = np.quantile(each, (0.5, 0.95))
    return Divergence(float(each.mean()), float(median), float(p95), same / each.size, int(each.size))
