"""Matrices of a model, plain or quantized: projections, embeddings, and embeddings used as the head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

Delta = Callable[[mx.array, mx.array], mx.array]
"""What adapters make of a projection: from its input `[..., in]` and its output `[..., out]` to another output."""


class Linear(Protocol):
    """`[..., in]` to `[..., out]`. `delta`: of the adapters that are mounted, None = there are none."""

    delta: Delta | None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), quantized or not."""
        ...

    def __call__(self, x: mx.array) -> mx.array: ...
    def arrays(self) -> list[mx.array]: ...


class Embedding(Protocol):
    """Token ids `[...]` int to `[..., D]`; `head` is the tied output projection `[..., D]` to `[..., V]`."""

    def __call__(self, tokens: mx.array) -> mx.array: ...
    def head(self, x: mx.array) -> mx.array: ...
    def arrays(self) -> list[mx.array]: ...


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a module is quantized: MLX mode, bits a value, values a scale."""

    mode: str
    bits: int
    group_size: int


class DenseLinear:
    """`x @ weight.T + bias`; weight `[out, in]`, bias `[out]`."""

    __slots__ = ("_transposed", "bias", "delta", "weight")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.delta: Delta | None = None
        self._transposed = weight.T

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self._transposed if self.bias is None else mx.addmm(self.bias, x, self._transposed)
        return y if self.delta is None else self.delta(x, y)

    def arrays(self) -> list[mx.array]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class QuantizedLinear:
    """The same with `weight` packed `[out, in * bits / 32]` uint32 and a scale (and bias) a group."""

    __slots__ = ("bias", "biases", "delta", "scales", "scheme", "weight")

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        scheme: Scheme,
        bias: mx.array | None = None,
    ) -> None:
        self.weight = weight
        self.scales = scales
        self.biases = biases
        self.scheme = scheme
        self.bias = bias
        self.delta: Delta | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1] * 32 // self.scheme.bits

    def __call__(self, x: mx.array) -> mx.array:
        scheme = self.scheme
        y = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=scheme.group_size,
            bits=scheme.bits,
            mode=scheme.mode,
        )
        if self.bias is not None:
            y = y + self.bias
        return y if self.delta is None else self.delta(x, y)

    def arrays(self) -> list[mx.array]:
        return [one for one in (self.weight, self.scales, self.biases, self.bias) if one is not None]


class DenseEmbedding:
    """A table `[V, D]`."""

    __slots__ = ("_transposed", "weight")

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight
        self._transposed = weight.T

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def head(self, x: mx.array) -> mx.array:
        return x @ self._transposed

    def arrays(self) -> list[mx.array]:
        return [self.weight]


class QuantizedEmbedding:
    """A table with quantized rows; `dtype` is what looked-up rows come in."""

    __slots__ = ("_linear", "dtype")

    def __init__(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None, scheme: Scheme, dtype: mx.Dtype
    ) -> None:
        self._linear = QuantizedLinear(weight, scales, biases, scheme)
        self.dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        table, scheme = self._linear, self._linear.scheme
        return mx.dequantize(
            table.weight[tokens],
            table.scales[tokens],
            None if table.biases is None else table.biases[tokens],
            group_size=scheme.group_size,
            bits=scheme.bits,
            mode=scheme.mode,
            dtype=self.dtype,
        )

    def head(self, x: mx.array) -> mx.array:
        return self._linear(x)

    def arrays(self) -> list[mx.array]:
        return self._linear.arrays()
