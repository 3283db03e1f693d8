"""The tokens of one step, laid end to end, and whose they are.

Projections, norms and MLPs see all tokens of a step as one matrix `[T, D]`, whichever rows they belong to; only what
remembers (attention, recurrent layers) looks at rows, each with caches of its own. So rows join and leave between
two steps without moving a byte, a cache is shared with the prefix cache without a copy, kinds of caches mix, and a
row of a batch computes what it computes alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Rotate = Callable[[mx.array], mx.array]
"""Rotates heads `[T, H, D]` of all tokens of a step, each by its own position."""


@dataclass(slots=True)
class Row:
    """The tokens `begin:end` of a step belong to one sequence, whose caches held `offset` tokens before."""

    caches: list[Any]
    begin: int
    end: int
    offset: int
    planned: int  # length of the sequence that is known to come; see `DecoderModel.make_caches`

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def total(self) -> int:
        """Tokens that rope kinds depending on the length have to count with."""
        return max(self.offset + self.length, self.planned)


class Batch:
    """`tokens` [T] int32, and the rows that they belong to, in order. Good for one pass of one model."""

    __slots__ = ("_added", "_masks", "layer_inputs", "lent", "query_scale", "rotate", "rows", "tokens")

    def __init__(self, tokens: mx.array, parts: Sequence[tuple[list[Any], int]]) -> None:
        """`parts`: caches and number of tokens of each row."""
        self.tokens = tokens
        self.rows: list[Row] = []
        self.rotate: dict[str, Rotate] = {}  # by the name that the model's layers know it by
        self.query_scale: mx.array | None = None  # [T, 1, 1]
        self.layer_inputs: mx.array | None = (
            None  # [T, layers, width], of what each layer gets beside the stream
        )
        self.lent: dict[
            int, Any
        ] = {}  # keys, values and masks of caches, by place, for layers without their own
        self._masks: dict[tuple[int, int], Any] = {}
        self._added: dict[tuple[str | int, int, int], mx.array] = {}
        begin = 0
        for caches, length in parts:
            self.rows.append(Row(caches, begin, begin + length, caches[0].offset, caches[0].planned))
            begin += length

    @property
    def decodes(self) -> bool:
        """Whether every row has one token."""
        return len(self.rows) == self.tokens.shape[0]

    def mask(self, place: int, cache: Any) -> Any:
        """What row `place` may see in `cache`, which is about to be updated; the same for caches of one window."""
        row = self.rows[place]
        if row.length == 1:
            return None
        key = (place, getattr(cache, "window", 0))
        if key not in self._masks:
            self._masks[key] = cache.mask(row.length)
        return self._masks[key]

    def added(self, mask: Any, length: int, total: int) -> mx.array | None:
        """A row's mask of its `length` tokens over `total` as float32 to be added to scores; made once a pass."""
        if mask is None:
            return None
        key = (mask if isinstance(mask, str) else id(mask), length, total)
        if key not in self._added:
            if isinstance(mask, str):
                mask = mx.arange(total)[None] <= mx.arange(total - length, total)[:, None]
            self._added[key] = mx.where(mask, 0.0, -math.inf)
        return self._added[key]

    def last(self, hidden: mx.array, places: Sequence[int]) -> mx.array:
        """The hidden states [R, D] of the last tokens of these rows."""
        if len(places) == hidden.shape[0]:
            return hidden
        return hidden[mx.array([self.rows[place].end - 1 for place in places])]


def solo(tokens: mx.array, caches: list[Any]) -> Batch:
    """One row: `tokens` [L]."""
    return Batch(tokens, [(caches, tokens.shape[0])])
