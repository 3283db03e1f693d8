"""Norms over the last axis."""

import math
from typing import Protocol

import mlx.core as mx


class Norm(Protocol):
    """`[..., D]` to the same shape."""

    def __call__(self, x: mx.array) -> mx.array: ...


class RMSNorm:
    """x / rms(x) * weight; `weight` [D], or None for no scale. Zhang and Sennrich 2019.

    On CPU mlx has no kernel of its own for it. Written out with the mean's division in the weight it takes two thirds
    of the time of mlx's steps for one token, and as long for many.
    """

    __slots__ = ("_by_root", "_floor", "eps", "weight")

    def __init__(self, weight: mx.array | None, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._by_root: mx.array | None = None
        if (
            weight is not None
            and weight.dtype == mx.float32
            and mx.default_device().type == mx.DeviceType.cpu
        ):
            size = weight.shape[0]
            self._by_root = (weight * math.sqrt(size))[None]
            self._floor = mx.array([[size * eps]])

    def __call__(self, x: mx.array) -> mx.array:
        if self._by_root is None or x.dtype != mx.float32:
            return mx.fast.rms_norm(x, self.weight, self.eps)
        return x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + self._floor) * self._by_root


class LayerNorm:
    """(x - mean) / deviation * weight + bias; both [D]. Ba et al. 2016."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: mx.array, bias: mx.array, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)
