"""Attention over quantized keys and values.

A few queries (decode) go through `mx.quantized_matmul` against the packed keys; many (a chunk of a prompt) against
keys multiplied out for the moment, which costs less than so many rows of scores. Softmax is in float32 either way.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

FEW = 8
"""Queries up to which scores are worked out against the packed keys."""


@dataclass(frozen=True, slots=True)
class Packed:
    """`[1, H, T, D]` by MLX's affine quantization along the last axis."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def plain(self) -> mx.array:
        """Multiplied out."""
        return mx.dequantize(
            self.weight, self.scales, self.biases, group_size=self.group_size, bits=self.bits
        )

    def product(self, x: mx.array, *, transpose: bool) -> mx.array:
        """`x` times this, or its transpose, head by head."""
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
        )

    @property
    def num_tokens(self) -> int:
        return self.weight.shape[2]


@dataclass(frozen=True, slots=True)
class Joined:
    """Tokens kept as they are, and the packed ones that follow them."""

    first: mx.array
    rest: Packed

    def plain(self) -> mx.array:
        """Multiplied out."""
        return mx.concatenate([self.first, self.rest.plain()], axis=2)

    @property
    def num_tokens(self) -> int:
        return self.first.shape[2] + self.rest.num_tokens


def packed_attention(
    queries: mx.array,
    keys: Packed | Joined,
    values: Packed | Joined,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """As `mx.fast.scaled_dot_product_attention`: `queries` [1, H, L, D] -> [1, H, L, E]."""
    if queries.shape[2] > FEW:
        return mx.fast.scaled_dot_product_attention(
            queries, keys.plain(), values.plain(), scale=scale, mask=mask, sinks=sinks
        )
    _, heads, length, dim = queries.shape
    kv_heads = (keys.first if isinstance(keys, Joined) else keys.weight).shape[1]
    grouped = (queries * scale).reshape(1, kv_heads, heads // kv_heads * length, dim)
    scores = _scores(grouped, keys).reshape(1, kv_heads, heads // kv_heads, length, -1).astype(mx.float32)
    if isinstance(mask, str):
        total = scores.shape[-1]
        mask = mx.arange(total)[None] <= mx.arange(total - length, total)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        extra = mx.broadcast_to(extra, (*scores.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    weights = weights.astype(queries.dtype).reshape(1, kv_heads, heads // kv_heads * length, -1)
    return _weighted(weights, values).reshape(1, heads, length, -1)


def _scores(queries: mx.array, keys: Packed | Joined) -> mx.array:
    if isinstance(keys, Packed):
        return keys.product(queries, transpose=True)
    first = queries @ keys.first.swapaxes(-1, -2)
    return mx.concatenate([first, keys.rest.product(queries, transpose=True)], axis=-1)


def _weighted(weights: mx.array, values: Packed | Joined) -> mx.array:
    if isinstance(values, Packed):
        return values.product(weights, transpose=False)
    count = values.first.shape[2]
    return weights[..., :count] @ values.first + values.rest.product(weights[..., count:], transpose=False)
