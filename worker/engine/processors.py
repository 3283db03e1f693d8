"""What changes logits before anything is drawn: bias, penalties, the mask of a grammar. All for many rows at once.

Each function takes `logits` [R, V] in float32 and gives the same shape; a row's result depends on its own logits and
numbers alone, to the last bit. The newest token of a row may not have been read yet: it stays on the device.
"""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from worker.engine.sequence import Sequence


def add_bias(logits: mx.array, biases: Seq[Seq[tuple[int, float]]]) -> mx.array:
    """Each row's (id, what is added to its logit)."""
    most = max(map(len, biases))
    ids = np.zeros((len(biases), most), np.int32)
    values = np.zeros((len(biases), most), np.float32)  # what fills a row up adds nothing to token 0
    for place, bias in enumerate(biases):
        for column, (token, value) in enumerate(bias):
            ids[place, column], values[place, column] = token, value
    return logits.at[_rows(logits), mx.array(ids)].add(mx.array(values))


class Recent:
    """The newest tokens of each row: `ids` int32 [R, W], and which of them count, `counts` float32 [R, W].

    A place that does not count repeats the newest token of its row.
    """

    def __init__(self, rows: Seq[Sequence], sizes: Seq[int]) -> None:
        """`sizes`: tokens of prompt and answer that count for each row, 0 = all."""
        earlier = [_before_newest(row, size) for row, size in zip(rows, sizes, strict=True)]
        most = max(map(len, earlier))
        ids = np.zeros((len(rows), most), np.int32)
        counts = np.zeros((len(rows), most), np.float32)
        for place, tokens in enumerate(earlier):
            ids[place, : len(tokens)] = tokens
            counts[place, : len(tokens)] = 1
        last = newest(rows)[:, None]
        held = mx.where(mx.array(counts) > 0, mx.array(ids), last)
        self.ids = mx.concatenate([held, last], axis=1)
        self.counts = mx.concatenate([mx.array(counts), mx.ones((len(rows), 1))], axis=1)


def penalize_repetition(logits: mx.array, recent: Recent, penalties: mx.array) -> mx.array:
    """Recent tokens: a positive logit is divided, a negative one multiplied (Keskar et al. 2019). `penalties` [R]."""
    seen = mx.take_along_axis(logits, recent.ids, axis=1)
    by = penalties[:, None]
    return mx.put_along_axis(logits, recent.ids, mx.where(seen > 0, seen / by, seen * by), axis=1)


def penalize_presence(logits: mx.array, recent: Recent, penalties: mx.array) -> mx.array:
    """Recent tokens lose `penalties` [R], each once."""
    seen = mx.take_along_axis(logits, recent.ids, axis=1)
    return mx.put_along_axis(logits, recent.ids, seen - penalties[:, None], axis=1)


def penalize_frequency(logits: mx.array, recent: Recent, penalties: mx.array) -> mx.array:
    """Recent tokens lose `penalties` [R] as often as they occur."""
    return logits.at[_rows(logits), recent.ids].add(-penalties[:, None] * recent.counts)


def keep_allowed(logits: mx.array, allowed: np.ndarray) -> mx.array:
    """`allowed` bool [R, V]; every other token becomes -inf."""
    return mx.where(mx.array(allowed), logits, -mx.inf)


def newest(rows: Seq[Sequence]) -> mx.array:
    """The newest token of each row, int32 [R]: the one that was drawn last, read or not, else the prompt's last."""
    parts: list[mx.array] = []
    start = 0
    while start < len(rows):
        first = rows[start].token
        end = start + 1
        if first is None:
            while end < len(rows) and rows[end].token is None:
                end += 1
            parts.append(mx.array([row.ids()[-1] for row in rows[start:end]], dtype=mx.int32))
        else:
            places = [first[1]]
            while end < len(rows) and (other := rows[end].token) is not None and other[0] is first[0]:
                places.append(other[1])
                end += 1
            parts.append(_pick(first[0], places))
        start = end
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _pick(array: mx.array, places: list[int]) -> mx.array:
    """`array[places]`, without work where that is a slice of it."""
    begin, count = places[0], len(places)
    if places == list(range(begin, begin + count)):
        return array if count == array.shape[0] else array[begin : begin + count]
    return array[mx.array(places)]


def _before_newest(row: Sequence, size: int) -> np.ndarray:
    """Ids that were read, without the newest of the row; so many that with it there are `size`."""
    ids = np.array(row.ids()[-size:] if size else row.ids(), np.int32)
    if row.token is None or row.is_read:
        ids = ids[:-1]
    return ids[max(0, len(ids) - size + 1) :] if size else ids


def _rows(logits: mx.array) -> mx.array:
    return mx.arange(logits.shape[0])[:, None]
