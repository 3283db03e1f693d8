"""Attention over the rows of a step, each against its own cache."""

import math
from typing import Any

import mlx.core as mx

from worker.layers.activations import exp2
from worker.layers.batch import Batch
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.packed import packed_attention

_LOG2_E = math.log2(math.e)

Stored = list[tuple[Any, Any]]
"""Keys and values of every row as attention sees them: what its cache held, and the tokens of this step."""


def store(batch: Batch, place: int, keys: mx.array, values: mx.array) -> tuple[Stored, list[Any]]:
    """Append `keys` [T, H, D] and `values` [T, H, E] to the caches number `place` of all rows.

    -> (what attention is to see, row by row; the masks of it).
    """
    stored: Stored = []
    masks: list[Any] = []
    parts = zip(_by_rows(keys, batch), _by_rows(values, batch), strict=True)
    for number, (row, part) in enumerate(zip(batch.rows, parts, strict=True)):
        cache = row.caches[place]
        masks.append(batch.mask(number, cache))
        stored.append(cache.update(*part))
    return stored, masks


def _by_rows(x: mx.array, batch: Batch) -> list[mx.array]:
    """What is each row's of `[T, H, D]`, as `[1, H, L, D]`."""
    if batch.decodes and len(batch.rows) > 1:
        return list(mx.split(x[:, :, None], len(batch.rows)))
    return [heads_first(x, row.begin, row.end) for row in batch.rows]


def attend(
    batch: Batch,
    queries: mx.array,
    stored: Stored,
    masks: list[Any],
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of `queries` [T, H, D] -> [T, H * E]. `sinks` [H]: a logit per head that takes its share."""
    composes = (
        sinks is None
        and queries.dtype == mx.float32
        and mx.default_device().type == mx.DeviceType.cpu
        and all(isinstance(keys, mx.array) for keys, _ in stored)
    )
    if composes and batch.decodes:
        return _one_each(queries, stored, scale)
    outs = []
    for row, (keys, values), mask in zip(batch.rows, stored, masks, strict=True):
        if composes:
            own = queries[row.begin : row.end]
            if row.length == 1:
                outs.append(_one_each(own, [(keys, values)], scale))
            else:
                outs.append(_composed(own, keys, values, scale, batch.added(mask, row.length, keys.shape[2])))
            continue
        heads = heads_first(queries, row.begin, row.end)
        if isinstance(keys, mx.array):
            out = mx.fast.scaled_dot_product_attention(
                heads, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        else:
            out = packed_attention(heads, keys, values, scale, mask, sinks)
        outs.append(tokens_first(out))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=0)


def _one_each(queries: mx.array, stored: Stored, scale: float) -> mx.array:
    """One query a row, composed: `queries` [R, H, D] -> [R, H * E]."""
    count, heads, dim = queries.shape
    shared = stored[0][0].shape[1]
    own = (queries * (scale * _LOG2_E)).reshape(count, shared, heads // shared, dim)
    parts = [
        _shares(each, keys, values) for each, (keys, values) in zip(mx.split(own, count), stored, strict=True)
    ]
    outs, sums = ([one[n] for one in parts] for n in (0, 1))
    return (mx.concatenate(outs) / mx.concatenate(sums)).reshape(count, -1)


def _composed(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Many queries of one row: `queries` [L, H, D], `mask` [L, tokens] to be added -> [L, H * E]."""
    length, heads, dim = queries.shape
    shared = keys.shape[1]
    own = (queries * (scale * _LOG2_E)).transpose(1, 0, 2).reshape(1, shared, heads // shared * length, dim)
    out, sums = _shares(own, keys, values, mask)
    return (out / sums).reshape(heads, length, -1).transpose(1, 0, 2).reshape(length, -1)


def _shares(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Attention before its last division, where mlx has no kernel for it: `queries` [1, H, G, D] of the G that look at
    the same keys, in units of a power of two -> [1, H, G, E] and the sums [1, H, G, 1].

    On CPU it is composed in any case, and `mx.softmax` takes twice as long there as these steps with a power of two.
    Heads that share keys are the rows of one product.
    """
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = (scores.reshape(-1, *mask.shape) + mask).reshape(scores.shape)
    weights = exp2(scores - mx.max(scores, axis=-1, keepdims=True))
    return weights @ values, mx.sum(weights, axis=-1, keepdims=True)


def heads_first(x: mx.array, begin: int, end: int) -> mx.array:
    """The tokens `begin:end` of `[T, H, D]` as `[1, H, L, D]`."""
    if end - begin != x.shape[0]:
        x = x[begin:end]
    if end - begin == 1:
        return x.reshape(1, x.shape[1], 1, x.shape[2])
    return x.transpose(1, 0, 2)[None]


def tokens_first(x: mx.array) -> mx.array:
    """`[1, H, L, D]` to `[L, H * D]`."""
    _, heads, length, dim = x.shape
    if length == 1:
        return x.reshape(1, heads * dim)
    return x[0].transpose(1, 0, 2).reshape(length, heads * dim)


class Attention:
    """Grouped-query attention of one layer. What a family does not have is None.

    `place`: of this layer's cache among a row's caches. `rotation`: its name in `Batch.rotate`. `gate`: queries come
    with a gate of the same size behind each head, whose sigmoid the result is multiplied with. `v` None: values are
    the keys as projected. `k` None: keys and values are those that the layer with `lends` stored at `place`.
    """

    def __init__(
        self,
        *,
        place: int,
        q: Linear,
        k: Linear | None,
        v: Linear | None,
        o: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rotation: str | None = "",
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        v_norm: Norm | None = None,
        sinks: mx.array | None = None,
        gate: bool = False,
        lends: bool = False,
    ) -> None:
        self.place, self.scale, self.rotation = place, scale, rotation
        self.q, self.k, self.v, self.o = q, k, v, o
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm
        self.sinks, self.gate, self.lends = sinks, gate, lends

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """`x` [T, D] to the same shape."""
        count = x.shape[0]
        gate = None
        queries = self.q(x).reshape(count, self.num_heads, -1)
        if self.gate:
            queries, gate = mx.split(queries, 2, axis=-1)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        if self.rotation is not None:
            queries = batch.rotate[self.rotation](queries)
        if batch.query_scale is not None:
            queries = queries * batch.query_scale
        stored, masks = batch.lent[self.place] if self.k is None else self._remember(self.k, x, batch)
        out = attend(batch, queries, stored, masks, self.scale, self.sinks)
        if gate is not None:
            out = out * mx.sigmoid(gate.reshape(count, -1))
        return self.o(out)

    def _remember(self, k: Linear, x: mx.array, batch: Batch) -> tuple[Stored, list[Any]]:
        shape = (x.shape[0], self.num_kv_heads, self.head_dim)
        keys = k(x).reshape(shape)
        values = keys if self.v is None else self.v(x).reshape(shape)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        if self.v_norm is not None:
            values = self.v_norm(values)
        if self.rotation is not None:
            keys = batch.rotate[self.rotation](keys)
        found = store(batch, self.place, keys, values)
        if self.lends:
            batch.lent[self.place] = found
        return found
