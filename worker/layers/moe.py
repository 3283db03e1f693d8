"""Mixture of experts: a router that picks experts for each token, and the experts' gated MLPs.

Everything is over the tokens of a step, `[T, D]`. Routing is in float32, as the families were trained.
"""

from collections.abc import Callable

import mlx.core as mx

from worker.layers.activations import Activation
from worker.layers.linear import Linear
from worker.layers.stacked import DenseStacked, Stacked

Routing = tuple[mx.array, mx.array]
"""Which experts a token goes to `[T, k]` uint32, and what their answers weigh `[T, k]` float32."""

Router = Callable[[mx.array], Routing]
Combine = Callable[[mx.array, mx.array], mx.array]
"""What experts make of their gate and up products."""

MANY = 64
"""Answers of experts from which on they are computed expert by expert instead of token by token."""

BLOCK, BLOCKS_FROM = 16, 4
"""Tokens of one expert that mlx's CPU backend multiplies at once, given so many answers per expert or more."""


def gated(act: Activation) -> Combine:
    """act(gate) * up."""
    return lambda gate, up: act(gate) * up


def clipped_swiglu(alpha: float, limit: float) -> Combine:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both bounded by `limit`, the gate from above only."""

    def combine(gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, limit)
        up = mx.clip(up, -limit, limit)
        return (up + 1) * (gate * mx.sigmoid(gate * alpha))

    return combine


class Experts:
    """E gated MLPs of one shape; `gate` and `up` are `[E, wide, D]`, `down` `[E, D, wide]`."""

    __slots__ = ("combine", "count", "down", "gate", "up")

    def __init__(self, gate: Stacked, up: Stacked, down: Stacked, combine: Combine) -> None:
        self.gate, self.up, self.down, self.combine = gate, up, down, combine
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.count = gate.weight.shape[0] if on_cpu and isinstance(gate, DenseStacked) else 0

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        """The weighed answers to `x` [T, D] of the experts of each token, summed: [T, D]."""
        indices, weights = routing
        count, each = indices.shape
        if count * each < MANY:
            answers = self._answers(x[:, None, None], indices, in_order=False)
        elif self.count and count * each >= BLOCKS_FROM * self.count:
            answers = self._by_blocks(x, indices).reshape(count, each, 1, -1)
        else:
            flat = indices.reshape(-1)
            order = mx.argsort(flat)
            answers = self._answers(x[order // each][:, None], flat[order], in_order=True)
            answers = answers[mx.argsort(order)].reshape(count, each, 1, -1)
        return (answers[..., 0, :] * weights[..., None].astype(x.dtype)).sum(axis=1)

    def _by_blocks(self, x: mx.array, indices: mx.array) -> mx.array:
        """Answers `[T * k, D]`, from blocks of tokens of one expert each.

        On CPU `gather_mm` multiplies matrix by matrix, so that a row by itself costs many times a row of a block. The
        last block of an expert is filled up with any token; how many blocks there are at most is known beforehand.
        """
        each, flat = indices.shape[1], indices.reshape(-1).astype(mx.int32)
        sizes = (flat[:, None] == mx.arange(self.count)).sum(axis=0).astype(mx.int32)
        room = (sizes + BLOCK - 1) // BLOCK * BLOCK
        ends = mx.cumsum(room)
        order = mx.argsort(flat)
        shift = (ends - room) - (mx.cumsum(sizes) - sizes)
        slots = mx.arange(flat.size, dtype=mx.int32) + shift[flat[order]]
        blocks = (flat.size + self.count * (BLOCK - 1)) // BLOCK
        tokens = mx.zeros(blocks * BLOCK, mx.int32)
        tokens[slots] = order.astype(mx.int32) // each
        begins = mx.arange(blocks, dtype=mx.int32) * BLOCK
        owners = mx.minimum((ends <= begins[:, None]).sum(axis=1), self.count - 1)
        rows = x[tokens].reshape(blocks, BLOCK, -1)
        answers = self._answers(rows, owners, in_order=True).reshape(blocks * BLOCK, -1)
        return answers[slots[mx.argsort(order)]]

    def _answers(self, x: mx.array, indices: mx.array, *, in_order: bool) -> mx.array:
        gate = self.gate.gather(x, indices, in_order=in_order)
        up = self.up.gather(x, indices, in_order=in_order)
        return self.down.gather(self.combine(gate, up), indices, in_order=in_order)


class SparseMLP:
    """The experts that the router picks for each token, and what all tokens share, if anything."""

    __slots__ = ("experts", "router", "shared")

    def __init__(
        self, router: Router, experts: Experts, shared: Callable[[mx.array], mx.array] | None = None
    ) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: mx.array) -> mx.array:
        """`x` [T, D] to the same shape."""
        out = self.experts(x, self.router(x))
        return out if self.shared is None else out + self.shared(x)


class SoftmaxRouter:
    """Softmax over all experts, then the greatest `k`; `normalise`: their weights sum to 1."""

    __slots__ = ("gate", "k", "normalise")

    def __init__(self, gate: Linear, k: int, *, normalise: bool) -> None:
        self.gate, self.k, self.normalise = gate, k, normalise

    def __call__(self, x: mx.array) -> Routing:
        shares = mx.softmax(self.gate(x).astype(mx.float32), axis=-1)
        indices = top_k(shares, self.k)
        weights = mx.take_along_axis(shares, indices, axis=-1)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return indices, weights


class TopSoftmaxRouter:
    """The greatest `k` logits, then softmax over these: gpt-oss."""

    __slots__ = ("gate", "k")

    def __init__(self, gate: Linear, k: int) -> None:
        self.gate, self.k = gate, k

    def __call__(self, x: mx.array) -> Routing:
        logits = self.gate(x).astype(mx.float32)
        indices = top_k(logits, self.k)
        return indices, mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)


class SigmoidRouter:
    """DeepSeek-V3: sigmoids, chosen by value plus `correction` [E], weighed by value alone.

    Of `groups` of experts only the best `kept_groups` are chosen from; a group counts as its two best. `scale`
    multiplies the weights. `gate` is held and run in float32.
    """

    __slots__ = ("correction", "gate", "groups", "k", "kept_groups", "normalise", "scale")

    def __init__(
        self,
        gate: Linear,
        correction: mx.array,
        k: int,
        *,
        groups: int,
        kept_groups: int,
        normalise: bool,
        scale: float,
    ) -> None:
        self.gate, self.correction, self.k = gate, correction, k
        self.groups, self.kept_groups = groups, kept_groups
        self.normalise, self.scale = normalise, scale

    def __call__(self, x: mx.array) -> Routing:
        values = mx.sigmoid(self.gate(x.astype(mx.float32)))
        indices = top_k(self._of_best_groups(values + self.correction), self.k)
        weights = mx.take_along_axis(values, indices, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return indices, weights * self.scale

    def _of_best_groups(self, scores: mx.array) -> mx.array:
        if self.kept_groups >= self.groups:
            return scores
        count = scores.shape[0]
        grouped = scores.reshape(count, self.groups, -1)
        best = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
        dropped = mx.argpartition(-best, self.kept_groups - 1, axis=-1)[:, self.kept_groups :, None]
        return mx.put_along_axis(grouped, dropped, mx.array(-mx.inf), axis=1).reshape(count, -1)


def top_k(scores: mx.array, k: int) -> mx.array:
    """The places [T, k] of the greatest of `scores` [T, E], in no order. No gradient goes through a choice."""
    scores = mx.stop_gradient(scores)
    if k == scores.shape[-1]:
        return mx.broadcast_to(mx.arange(k, dtype=mx.uint32), scores.shape)
    return mx.argpartition(-scores, k - 1, axis=-1)[:, :k]
