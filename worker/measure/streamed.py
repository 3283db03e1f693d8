"""Final hidden states of many texts with one layer of the model in memory at a time.

All texts go through a layer before the next one is read, and a layer is let go when they have. So a model larger than
memory can be measured, and reading it once is enough. For models whose graph is ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx
import msgspec

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from worker.layers.batch import Batch
from worker.models import FAMILIES, choose_dtype
from worker.models.decoder import Decoder
from worker.train.rows import batch_of
from worker.weights import Weights, multiply_out, unread_tensors

PASS_TOKENS = 2048
"""Tokens that go through a layer at once."""

Head = Callable[[mx.array], mx.array]
"""Hidden states [N, D] to logits [N, V]."""

Tell = Callable[[int, int], None]
"""Called between two layers with (layers done, layers); may raise to stop."""


def unread_decoder(
    checkpoint: Checkpoint, dtype: str = "auto", tensors: Mapping[str, mx.array] | None = None
) -> Decoder:
    """The graph over weights that nobody has read yet. Raises `Refused` (unsupported, bad_checkpoint).

    `tensors`: to take instead of what is in the files.
    """
    build = FAMILIES.get(checkpoint.model_type)
    if build is None:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: models of family {checkpoint.model_type!r} have no graph here; "
            f"those that have: {', '.join(FAMILIES)}",
            param="model",
        )
    weights = Weights(checkpoint, choose_dtype(checkpoint, dtype), tensors)
    model = build(checkpoint, weights)
    weights.finish()
    assert isinstance(model, Decoder)
    return model


def plain_decoder(checkpoint: Checkpoint) -> Decoder:
    """The same for many tokens at once: on a CPU quantized weights are multiplied out as they are read, because mlx's
    products with packed weights do not go through the BLAS there.
    """
    if mx.default_device().type != mx.DeviceType.cpu or not checkpoint.quantization:
        return unread_decoder(checkpoint)
    tensors = unread_tensors(checkpoint)
    if not multiply_out(checkpoint, tensors, dtype=mx.float32):
        return unread_decoder(checkpoint)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization"}
    plain = msgspec.structs.replace(checkpoint, config=config, quantization="")
    return unread_decoder(plain, tensors=tensors)


def passes(model: Decoder, rows: Sequence[Sequence[int]]) -> list[Batch]:
    """The rows in batches of about `PASS_TOKENS` tokens, in order."""
    groups: list[list[Sequence[int]]] = [[]]
    filled = 0
    for row in rows:
        if groups[-1] and filled + len(row) > PASS_TOKENS:
            groups.append([])
            filled = 0
        groups[-1].append(row)
        filled += len(row)
    return [batch_of(model.layout, group) for group in groups if group]


def final_states(model: Decoder, rows: Sequence[Sequence[int]], tell: Tell) -> Iterator[mx.array]:
    """The final hidden states [T, D] of each batch of `passes`. `model` has no layers left behind it."""
    batches = passes(model, rows)
    streams = [model.begin(batch) for batch in batches]
    mx.eval(streams)
    layers, model.layers = list(model.layers), []
    total = len(layers)
    while layers:
        tell(total - len(layers), total)
        layer = layers.pop(0)
        for place, batch in enumerate(batches):
            streams[place] = layer(streams[place], batch)
            mx.eval(streams[place])
        del layer
        mx.clear_cache()
    tell(total, total)
    for stream in streams:
        yield model.norm(stream)
