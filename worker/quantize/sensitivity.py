"""How much each matrix matters: the divergence of the whole model with that one matrix quantized, at each bits.

KL(model || model with one matrix quantized) in float32, a mean over all positions of the calibration pieces. Layers
before the matrix compute what they do in the whole model, so each run begins at its layer with what came in there.
"""

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from shared.errors import ErrorCode, refuse
from shared.units import format_bytes
from worker.layers.batch import Batch
from worker.measure.scores import divergence, log_probabilities
from worker.measure.streamed import passes, unread_decoder
from worker.models import choose_dtype
from worker.models.decoder import Decoder
from worker.quantize.layout import NEVER_CAST, Source
from worker.quantize.recipe import Matrix
from worker.weights import materialise

CHUNK = 256
"""Positions whose logits exist at once."""
KEPT_BYTES = 512 << 20
"""Of the whole model's log-probabilities; those beyond it are made again each time."""

Table = dict[str, dict[int, float]]
"""Divergence by module and bits."""


@dataclass(frozen=True)
class Progress:
    """What is told and asked meanwhile. `on_load` in bytes; `on_module` behind each one, with what was found."""

    on_load: Callable[[int, int], None]
    on_module: Callable[[str, dict[int, float]], None]
    check: Callable[[], None]


def measure_all(
    source: Source,
    matrices: Sequence[Matrix],
    bits: Sequence[int],
    group_size: int,
    rows: Sequence[Sequence[int]],
    known: Mapping[str, Mapping[int, float]],
    progress: Progress,
) -> Table:
    """The divergence of every matrix at all `bits`. `known`: what was found before. Takes the tensors out of `source`.

    Raises `Refused` (cannot_fit): the whole model has to be in memory.
    """
    found: Table = {module: dict(values) for module, values in known.items()}
    todo = [matrix for matrix in matrices if set(bits) - found.get(matrix.module, {}).keys()]
    if todo:
        probe = _Probe(source, rows, progress)
        probe.run(todo, bits, group_size, found)
    return found


class _Probe:
    """The model in memory, and what its layers get."""

    def __init__(self, source: Source, rows: Sequence[Sequence[int]], progress: Progress) -> None:
        self.source, self.progress = source, progress
        self.checkpoint = source.as_checkpoint
        self.dtype = choose_dtype(self.checkpoint, "auto")
        self.stored = {name: tensor.dtype for name, tensor in source.tensors.items()}
        self.tensors = {name: self._held(name, source.tensors.pop(name)) for name in self.stored}
        _check_memory(source, sum(tensor.nbytes for tensor in self.tensors.values()))
        materialise(list(self.tensors.values()), progress.on_load)
        self.model = self._built({})
        self.batches = passes(self.model, rows)
        self.finals = [self._whole(batch) for batch in self.batches]
        self.references: dict[tuple[int, int], mx.array] = {}
        self.kept = 0

    def run(self, todo: Sequence[Matrix], bits: Sequence[int], group_size: int, found: Table) -> None:
        """Layer by layer; `found` grows."""
        outside = [matrix for matrix in todo if matrix.layer is None]
        behind = [matrix for matrix in outside if matrix.module.endswith("lm_head")]
        self._try([matrix for matrix in outside if matrix not in behind], None, [], bits, group_size, found)
        streams = [self.model.begin(batch) for batch in self.batches]
        for index, layer in enumerate(self.model.layers):
            mx.eval(streams)
            inside = [matrix for matrix in todo if matrix.layer == index]
            self._try(inside, index, streams, bits, group_size, found)
            streams = [layer(stream, batch) for stream, batch in zip(streams, self.batches, strict=True)]
        mx.eval(streams)
        self._try(behind, len(self.model.layers), streams, bits, group_size, found)

    def _try(
        self,
        matrices: Sequence[Matrix],
        index: int | None,
        streams: Sequence[mx.array],
        bits: Sequence[int],
        group_size: int,
        found: Table,
    ) -> None:
        """`index`: of the layer to begin with, which gets `streams`; None = from the tokens on."""
        for matrix in matrices:
            values = found.setdefault(matrix.module, {})
            for one in bits:
                if one in values:
                    continue
                self.progress.check()
                candidate = self._built({f"{matrix.module}.weight": self._quantized(matrix, one, group_size)})
                values[one] = self._divergence(candidate, index, streams)
            mx.clear_cache()
            self.progress.on_module(matrix.module, values)

    def _divergence(self, candidate: Decoder, index: int | None, streams: Sequence[mx.array]) -> float:
        total, count = 0.0, 0
        for place, batch in enumerate(self.batches):
            own = copy.copy(batch)
            own.lent = dict(batch.lent)
            x = candidate.begin(own) if index is None else streams[place]
            for layer in candidate.layers[index or 0 :]:
                x = layer(x, own)
            hidden = candidate.norm(x)
            for begin in range(0, hidden.shape[0], CHUNK):
                reference = self._reference(place, begin)
                found = log_probabilities(candidate.head(hidden[begin : begin + CHUNK]))
                total += float(np.array(divergence(reference, found).sum()))
                count += reference.shape[0]
        value = total / count
        return value if math.isfinite(value) else math.inf

    def _reference(self, place: int, begin: int) -> mx.array:
        """Log-probabilities of the whole model."""
        key = (place, begin)
        if key in self.references:
            return self.references[key]
        found = log_probabilities(self.model.head(self.finals[place][begin : begin + CHUNK]))
        if self.kept + found.nbytes <= KEPT_BYTES:
            self.kept += found.nbytes
            self.references[key] = found
            mx.eval(found)
        return found

    def _whole(self, batch: Batch) -> mx.array:
        self.progress.check()
        hidden = self.model(batch)
        mx.eval(hidden)
        return hidden

    def _quantized(self, matrix: Matrix, bits: int, group_size: int) -> mx.array:
        """The weight with the values that it will have, in the type that the model runs in."""
        name = f"{matrix.module}.weight"
        weight = self.tensors[name].astype(self.stored[name])
        packed, scales, biases = mx.quantize(weight, group_size, bits)
        scales, biases = scales.astype(self.dtype), biases.astype(self.dtype)
        return mx.dequantize(packed, scales, biases, group_size, bits)

    def _built(self, others: Mapping[str, mx.array]) -> Decoder:
        name = str(self.dtype).rpartition(".")[2]
        return unread_decoder(self.checkpoint, name, {**self.tensors, **others})

    def _held(self, name: str, tensor: mx.array) -> mx.array:
        is_cast = mx.issubdtype(tensor.dtype, mx.floating) and not name.endswith(NEVER_CAST)
        return tensor.astype(self.dtype) if is_cast else tensor


def _check_memory(source: Source, needed: int) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise refuse(
            ErrorCode.CANNOT_FIT,
            f"{source.checkpoint.path}: to find out which matrices matter the whole model has to be in memory, which "
            f"takes {format_bytes(needed)}, and this machine has {format_bytes(total)}; leave target_bpw out, or run "
            "it on a larger machine",
            param="target_bpw",
        )
