"""Sequences as the rows of one pass that starts and ends with them: "caches" that keep nothing.

All tokens of a step are one matrix `[T, D]` without padding, so that a step costs its real tokens. A cache here gives
attention the keys and values of the pass itself, through which gradients go.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from shared.kv_layout import LayerKv
from worker.layers.batch import Batch


class PassingKV:
    """Keys and values of a row of `length` tokens, its first and last. `window` 0: every token sees all before it."""

    __slots__ = ("offset", "planned", "window")

    def __init__(self, length: int, window: int) -> None:
        self.offset, self.planned, self.window = 0, length, window

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def mask(self, length: int) -> mx.array | str | None:
        if length == 1:
            return None
        if not self.window or length <= self.window:
            return "causal"
        queries, keys = mx.arange(length)[:, None], mx.arange(length)[None]
        return (keys <= queries) & (keys > queries - self.window)


class PassingState:
    """The state of a recurrent layer before the first token of a row; what comes after the last is let go."""

    __slots__ = ("offset", "planned", "states")

    def __init__(self, length: int) -> None:
        self.offset, self.planned = 0, length
        self.states: list[mx.array] = []

    def advance(self, length: int, states: list[mx.array]) -> None:
        """Nothing: nobody comes after."""


def batch_of(layout: Sequence[LayerKv], rows: Sequence[Sequence[int]]) -> Batch:
    """A pass over sequences of token ids, each seeing itself alone. Masks are made here, once for all layers."""
    tokens = mx.array([token for row in rows for token in row], mx.int32)
    parts: list[tuple[list[Any], int]] = [(_caches(layout, len(row)), len(row)) for row in rows]
    batch = Batch(tokens, parts)
    for place, row in enumerate(batch.rows):
        for cache in row.caches:
            if isinstance(cache, PassingKV):
                batch.mask(place, cache)
    return batch


def _caches(layout: Sequence[LayerKv], length: int) -> list[Any]:
    return [PassingState(length) if one.is_recurrent else PassingKV(length, one.window) for one in layout]
