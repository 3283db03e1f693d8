"""Matrices of one shape stacked to `[N, out, in]`, plain or quantized: of experts, or of heads."""

from typing import Any, Protocol

import mlx.core as mx

from worker.layers.linear import Scheme


class Stacked(Protocol):
    """N projections, of which tokens choose."""

    def gather(self, x: mx.array, indices: mx.array, *, in_order: bool) -> mx.array:
        """`x` `[..., 1, in]` through the projections that `indices` `[...]` name -> `[..., 1, out]`.

        The leading dimensions are broadcast. `in_order`: `indices` never fall, which is faster.
        """
        ...


class HeadStack(Protocol):
    """N projections, all used at once. Their biases are left out."""

    def each(self, x: mx.array) -> mx.array:
        """`x` `[N or 1, L, in]`, each through its own projection -> `[N, L, out]`."""
        ...

    def back(self, x: mx.array) -> mx.array:
        """`x` `[N or 1, L, out]`, each through its own projection transposed -> `[N, L, in]`."""
        ...


class DenseStacked:
    """`x @ weight[n].T + bias[n]`; weight `[N, out, in]`, bias `[N, out]`."""

    __slots__ = ("_transposed", "bias", "weight")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.swapaxes(-1, -2)

    def gather(self, x: mx.array, indices: mx.array, *, in_order: bool) -> mx.array:
        y = mx.gather_mm(x, self._transposed, rhs_indices=indices, sorted_indices=in_order)
        return y if self.bias is None else y + self.bias[indices][..., None, :]

    def each(self, x: mx.array) -> mx.array:
        return x @ self._transposed

    def back(self, x: mx.array) -> mx.array:
        return x @ self.weight


class QuantizedStacked:
    """The same with `weight` packed `[N, out, in * bits / 32]` uint32 and a scale (and bias) a group."""

    __slots__ = ("_how", "bias", "biases", "scales", "weight")

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        scheme: Scheme,
        bias: mx.array | None = None,
    ) -> None:
        self.weight, self.scales, self.biases, self.bias = weight, scales, biases, bias
        self._how: dict[str, Any] = {
            "group_size": scheme.group_size,
            "bits": scheme.bits,
            "mode": scheme.mode,
        }

    def gather(self, x: mx.array, indices: mx.array, *, in_order: bool) -> mx.array:
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=indices,
            transpose=True,
            sorted_indices=in_order,
            **self._how,
        )
        return y if self.bias is None else y + self.bias[indices][..., None, :]

    def each(self, x: mx.array) -> mx.array:
        return self._product(x, transpose=True)

    def back(self, x: mx.array) -> mx.array:
        return self._product(x, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, transpose=transpose, **self._how)


class Turned:
    """A stack that is held the other way round: `[N, in, out]`."""

    __slots__ = ("_stack",)

    def __init__(self, stack: HeadStack) -> None:
        self._stack = stack

    def each(self, x: mx.array) -> mx.array:
        return self._stack.back(x)

    def back(self, x: mx.array) -> mx.array:
        return self._stack.each(x)
