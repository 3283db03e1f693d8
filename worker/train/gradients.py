"""Gradients of a loss with respect to the adapter's arrays: of the whole graph, by layer, or in segments.

By layer (gradient checkpointing, Chen et al. 2016): what a layer computed is thrown away and computed again on the way
back. In segments: only what passes between segments is kept, and each segment is evaluated before the next one is
looked at, so that memory is that of one segment whatever the depth. The gradients are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from worker.layers.batch import Batch
from worker.models import LoadedModel
from worker.models.decoder import Decoder
from worker.train.adapter import Adapter, Arrays, decoder_of
from worker.train.rows import batch_of

Loss = Callable[[mx.array], tuple[mx.array, dict[str, mx.array]]]
"""From final hidden states [T, D] to a scalar and what is told beside it."""

Outcome = tuple[mx.array, dict[str, mx.array], Arrays]
"""The loss, what is told beside it, the gradients."""


@dataclass(frozen=True)
class Graph:
    """A decoder with its adapter. `reads`: layers that use keys and values of earlier ones, and of which."""

    model: Decoder
    adapter: Adapter
    reads: dict[int, set[int]] = field(default_factory=dict)

    def hidden(self, batch: Batch) -> mx.array:
        """Final hidden states [T, D], with `adapter.arrays` as they are."""
        return self.model(batch)

    def value_and_grad(
        self, batch: Batch, loss: Loss, arrays: Arrays, *, by_layer: bool = False, segment: int = 0
    ) -> Outcome:
        """Loss and gradients at `arrays`; lazy, but for `segment` layers at a time, which are evaluated."""
        if segment:
            return self._in_segments(batch, loss, arrays, segment, by_layer=by_layer)

        def whole(arrays: Arrays) -> tuple[mx.array, dict[str, mx.array]]:
            self.adapter.arrays = arrays
            stream = [self.model.begin(batch)]
            for index in range(len(self.model.layers)):
                stream = self._run(batch, range(index, index + 1), arrays, stream, by_layer=by_layer)
            return loss(self.model.norm(stream[0]))

        (value, told), grads = mx.value_and_grad(whole)(arrays)
        return value, told, grads

    def _in_segments(
        self, batch: Batch, loss: Loss, arrays: Arrays, segment: int, *, by_layer: bool
    ) -> Outcome:
        depth = len(self.model.layers)
        first = min(site.layer for site in self.adapter.sites)
        pieces = [range(begin, min(begin + segment, depth)) for begin in range(first, depth, segment)]
        self.adapter.arrays = arrays
        stream = self._run(batch, range(first), arrays, [self.model.begin(batch)], by_layer=False)
        entered: list[list[mx.array]] = []
        for piece in pieces:
            mx.eval(stream)
            entered.append(stream)
            stream = self._run(batch, piece, arrays, stream, by_layer=False)
        (value, told), back = mx.value_and_grad(lambda x: loss(self.model.norm(x)))(stream[0])
        mx.eval(value, told, back)
        del stream
        grads: Arrays = {}
        cotangents = [back]
        while pieces:
            piece, inputs = pieces.pop(), entered.pop()
            names = self.adapter.names(piece)

            def run(*flat: mx.array, piece: range = piece, names: Sequence[str] = names) -> list[mx.array]:
                own = dict(zip(names, flat[: len(names)], strict=True))
                return self._run(batch, piece, own, list(flat[len(names) :]), by_layer=by_layer)

            _, found = mx.vjp(run, [*(arrays[name] for name in names), *inputs], cotangents)
            grads.update(zip(names, found[: len(names)], strict=True))
            cotangents = list(found[len(names) :])
            mx.eval([found])
        return value, told, {name: grads[name] for name in arrays}

    def _run(
        self, batch: Batch, layers: range, arrays: Arrays, stream: list[mx.array], *, by_layer: bool
    ) -> list[mx.array]:
        """`stream`: the residual stream, then keys and values that later layers use; the same after `layers`."""
        if by_layer:
            for index in layers:
                one = range(index, index + 1)
                own = {name: arrays[name] for name in self.adapter.names(one)}

                def again(own: Arrays, *inside: mx.array, one: range = one) -> list[mx.array]:
                    return self._run(batch, one, own, list(inside), by_layer=False)

                stream = mx.checkpoint(again)(own, *stream)
            return stream
        before, after = self._lent(layers.start), self._lent(layers.stop)
        masks = {place: self._masks(batch, place) for place in (*before, *after)}
        lent = iter(stream[1:])
        batch.lent = {
            place: ([(next(lent), next(lent)) for _ in batch.rows], masks[place]) for place in before
        }
        self.adapter.arrays = arrays
        x = stream[0]
        for index in layers:
            x = self.model.layers[index](x, batch)
        found = [x]
        for place in after:
            for keys, values in batch.lent[place][0]:
                found += [keys, values]
        return found

    def _lent(self, boundary: int) -> list[int]:
        """Places whose keys and values pass from layers before `boundary` to layers from it on."""
        return sorted(
            {
                place
                for index, places in self.reads.items()
                if index >= boundary
                for place in places
                if place < boundary
            }
        )

    def _masks(self, batch: Batch, place: int) -> list[Any]:
        return [batch.mask(number, row.caches[place]) for number, row in enumerate(batch.rows)]


class _Lent(dict[int, Any]):
    """Remembers what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def __getitem__(self, place: int) -> Any:
        self.asked.add(place)
        return super().__getitem__(place)


def graph_of(loaded: LoadedModel, adapter: Adapter) -> Graph:
    """Find out which layers use what others keep, by building the graph of one pass."""
    model = decoder_of(loaded)
    batch = batch_of(model.layout, [[0, 0]])
    reads: dict[int, set[int]] = {}
    lent = _Lent()
    batch.lent = lent
    x = model.begin(batch)
    for index, layer in enumerate(model.layers):
        x = layer(x, batch)
        if lent.asked:
            reads[index] = set(lent.asked)
            lent.asked.clear()
    return Graph(model, adapter, reads)
