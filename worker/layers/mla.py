"""Multi-head latent attention: the cache keeps one latent a token, from which every head has its keys and values.

DeepSeek-V2 (2024), 2.1; formulas: transformers 5.24 `modeling_deepseek_v3.py`. Two forms of one product: a chunk
multiplies the latents out to keys and values; few queries are turned into the space of the latents instead, and the
latents are never multiplied out.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from worker.layers.attention import heads_first, store, tokens_first
from worker.layers.batch import Batch
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.stacked import HeadStack


class LatentAttention:
    """Attention of one layer. A head of a query has `nope` plain values, then those that are rotated.

    `kv_a` gives the latent (`rank` values, then normed) and the one key that is rotated; `keys` `[H, nope, rank]` and
    `values` `[H, value_dim, rank]` multiply latents out. `turned_factor`: on the rotated part of the scores.
    """

    def __init__(
        self,
        *,
        place: int,
        q: Callable[[mx.array], mx.array],
        kv_a: Linear,
        kv_norm: Norm,
        keys: HeadStack,
        values: HeadStack,
        o: Linear,
        num_heads: int,
        nope: int,
        rank: int,
        value_dim: int,
        scale: float,
        turned_factor: float = 1.0,
        rotation: str = "",
    ) -> None:
        self.place, self.rotation = place, rotation
        self.q, self.kv_a, self.kv_norm, self.keys, self.values, self.o = q, kv_a, kv_norm, keys, values, o
        self.num_heads, self.nope, self.rank = num_heads, nope, rank
        self.scale, self.turned_factor = scale, turned_factor
        self.expand_from = cheaper_from(nope, rank, value_dim)

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """`x` [T, D] to the same shape."""
        rotate = batch.rotate[self.rotation]
        queries = self.q(x).reshape(x.shape[0], self.num_heads, -1)
        plain, turning = mx.split(queries, [self.nope], axis=-1)
        latent, key = mx.split(self.kv_a(x), [self.rank], axis=-1)
        turned = rotate(turning)
        if self.turned_factor != 1.0:
            turned = turned * self.turned_factor
        stored, masks = store(batch, self.place, self.kv_norm(latent)[:, None], rotate(key[:, None]))
        outs = []
        for row, (latents, keys), mask in zip(batch.rows, stored, masks, strict=True):
            attend = self._absorbed if row.length < self.expand_from else self._expanded
            parts = heads_first(plain, row.begin, row.end), heads_first(turned, row.begin, row.end)
            outs.append(tokens_first(attend(*parts, latents, keys, mask)))
        return self.o(outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=0))

    def _expanded(
        self, plain: mx.array, turned: mx.array, latents: mx.array, keys: mx.array, mask: Any
    ) -> mx.array:
        """Queries `[1, H, L, …]`, what is cached `[1, 1, S, …]` -> `[1, H, L, value_dim]`."""
        own = self.keys.each(latents[0])[None]
        shared = mx.broadcast_to(keys, (*own.shape[:-1], keys.shape[-1]))
        return mx.fast.scaled_dot_product_attention(
            mx.concatenate([plain, turned], axis=-1),
            mx.concatenate([own, shared], axis=-1),
            self.values.each(latents[0])[None],
            scale=self.scale,
            mask=mask,
        )

    def _absorbed(
        self, plain: mx.array, turned: mx.array, latents: mx.array, keys: mx.array, mask: Any
    ) -> mx.array:
        """The same. The rotated part of the scores goes in as what is added to the other part."""
        queries = self.keys.back(plain[0])[None]
        scores = (turned * self.scale) @ keys.swapaxes(-1, -2)
        if mask is not None:
            length, total = scores.shape[-2:]
            seen = mx.arange(total)[None] <= mx.arange(total - length, total)[:, None]
            scores = mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
        found = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=self.scale, mask=scores)
        return self.values.each(found[0])[None]


def cheaper_from(nope: int, rank: int, value_dim: int) -> float:
    """The number of queries from which on it is cheaper to multiply latents out.

    A query costs `2 * rank` products a token and head against latents and `nope + value_dim` against keys and values,
    which cost `rank * (nope + value_dim)` to make.
    """
    saved = 2 * rank - nope - value_dim
    return rank * (nope + value_dim) / saved if saved > 0 else math.inf
