"""The skeleton that every decoder family fills: embedding, layers, last norm, head.

A family's file reads its config, builds the layers out of `worker.layers`, and hands them to `Decoder`. The graph is
lazy: nothing here evaluates or reads a value.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from shared.kv_layout import LayerKv
from worker.cache.kv import LayerCache
from worker.cache.layers import make_caches
from worker.layers.batch import Batch
from worker.layers.linear import Embedding, Linear
from worker.layers.norm import Norm
from worker.layers.rope import Rope


class Layer(Protocol):
    """`x` [T, D] to the same shape; remembers through the caches of the batch's rows."""

    def __call__(self, x: mx.array, batch: Batch) -> mx.array: ...


class Block:
    """x + mixer(norm(x)), then x + mlp(norm(x)): the layer of most families. A mixer is attention or the like."""

    __slots__ = ("mixer", "mixer_norm", "mlp", "mlp_norm")

    def __init__(
        self, mixer_norm: Norm, mixer: Layer, mlp_norm: Norm, mlp: Callable[[mx.array], mx.array]
    ) -> None:
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp = mixer_norm, mixer, mlp_norm, mlp

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class Sandwich:
    """x + after(mixer(before(x))), then x + after(mlp(before(x))): norms on both sides, Gemma's layer.

    `mlp_norm` None: the MLP norms its input itself.
    """

    __slots__ = ("mixer", "mixer_after", "mixer_norm", "mlp", "mlp_after", "mlp_norm")

    def __init__(
        self,
        mixer_norm: Norm,
        mixer: Layer,
        mixer_after: Norm,
        mlp_norm: Norm | None,
        mlp: Callable[[mx.array], mx.array],
        mlp_after: Norm,
    ) -> None:
        self.mixer_norm, self.mixer, self.mixer_after = mixer_norm, mixer, mixer_after
        self.mlp_norm, self.mlp, self.mlp_after = mlp_norm, mlp, mlp_after

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        x = x + self.mixer_after(self.mixer(self.mixer_norm(x), batch))
        return x + self.mlp_after(self.mlp(x if self.mlp_norm is None else self.mlp_norm(x)))


class Decoder:
    """A whole model; `worker.models.DecoderModel` says what its methods promise.

    `ropes`: by the names that the layers ask for in `Batch.rotate`. `layout`: one entry per cache of a row.
    `head` None: the embedding is the head. `embed_scale` multiplies the embedding, `softcap` bounds the logits:
    softcap * tanh(logits / softcap). `query_scale` gives `Batch.query_scale` where queries depend on their position.
    `layer_inputs` gives `Batch.layer_inputs` of the scaled embeddings `[T, D]`.
    """

    def __init__(
        self,
        *,
        embed: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear | None,
        layout: Sequence[LayerKv],
        ropes: Mapping[str, Rope],
        embed_scale: float | None = None,
        softcap: float | None = None,
        query_scale: Callable[[Batch, mx.Dtype], mx.array | None] | None = None,
        layer_inputs: Callable[[mx.array, Batch], mx.array] | None = None,
    ) -> None:
        self.embed, self.layers, self.norm, self._head = embed, layers, norm, head
        self.layout, self.ropes = layout, ropes
        self.embed_scale, self.softcap, self._query_scale = embed_scale, softcap, query_scale
        self._layer_inputs = layer_inputs

    def __call__(self, batch: Batch) -> mx.array:
        x = self.begin(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)

    def begin(self, batch: Batch) -> mx.array:
        """What the first layer gets, `[T, D]`; prepares what all layers share."""
        x = self.embed(batch.tokens)
        if self.embed_scale is not None:
            x = x * mx.array(self.embed_scale, x.dtype)
        self.rotations(batch, x.dtype)
        if self._layer_inputs is not None:
            batch.layer_inputs = self._layer_inputs(x, batch)
        return x

    def rotations(self, batch: Batch, dtype: mx.Dtype) -> None:
        """Prepare what the layers of a pass share."""
        for name, rope in self.ropes.items():
            batch.rotate[name] = rope.over(batch, dtype)
        if self._query_scale is not None:
            batch.query_scale = self._query_scale(batch, dtype)

    def head(self, hidden: mx.array) -> mx.array:
        logits = self.embed.head(hidden) if self._head is None else self._head(hidden)
        return logits if self.softcap is None else mx.tanh(logits / self.softcap) * self.softcap

    def make_caches(self, length: int = 0) -> list[LayerCache]:
        return make_caches(self.layout, length)

    def regime(self, length: int) -> tuple[int, ...]:
        return tuple(rope.regime(length) for rope in self.ropes.values())
