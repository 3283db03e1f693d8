"""Norms over the last axis."""

from typing import Protocol

import mlx.core as mx


class Norm(Protocol):
    """`[..., D]` to the same shape."""

    def __call__(self, x: mx.array) -> mx.array: ...


class RMSNorm:
    """x / rms(x) * weight; `weight` [D], or None for no scale. Zhang and Sennrich 2019."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array | None, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)
