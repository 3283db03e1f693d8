"""One pass of an encoder over a group of texts. On the engine thread; waits for the numbers."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from worker.embed.pooling import Head, cut
from worker.embed.texts import Ids
from worker.models.bert import Encoder
from worker.unsound import no_numbers


def vectors(model: Encoder, head: Head, texts: Sequence[Ids], dimensions: int) -> list[bytes]:
    """The vector of each text, float32."""
    rows = _read(model, texts, lambda hidden, lengths: cut(dimensions)(head.pool(hidden, lengths)))
    return [bytes(memoryview(cast(Any, row))) for row in rows]


def scores(model: Encoder, texts: Sequence[Ids]) -> list[float]:
    """The score of each pair, 0 to 1."""
    rows = _read(model, texts, lambda hidden, lengths: mx.sigmoid(model.scores(hidden).astype(mx.float32)))
    return [cast(float, row.item()) for row in rows]


def _read(
    model: Encoder, texts: Sequence[Ids], then: Callable[[mx.array, list[int]], mx.array]
) -> list[mx.array]:
    """What `then` makes of the hidden states, row by row."""
    lengths = [len(text.ids) for text in texts]
    longest = max(lengths)
    most = model.num_types - 1
    ids = mx.array([text.ids + [0] * (longest - len(text.ids)) for text in texts], mx.int32)
    types = mx.array(
        [[min(one, most) for one in text.types] + [0] * (longest - len(text.ids)) for text in texts], mx.int32
    )
    hidden = model(ids, types, lengths)
    found = then(hidden, lengths)
    is_sound = mx.all(mx.isfinite(found))
    mx.eval(found, is_sound)
    mx.clear_cache()
    if not is_sound.item():
        dtype = str(hidden.dtype).rpartition(".")[2]
        raise refuse(ErrorCode.ENGINE_FAULT, no_numbers("the model's hidden states", dtype))
    return list(found)
