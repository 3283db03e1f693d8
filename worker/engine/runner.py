"""One forward pass of a step; the only caller of the model. Graphs stay lazy, nothing is read here.

All tokens of a step, those of decoding rows and pieces of prompts, are one pass and one `mx.async_eval`.
"""

import time
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from worker.engine.sampling import sample
from worker.engine.scheduler import Step
from worker.engine.sequence import Sequence
from worker.layers.batch import Batch

_async_eval: Any = mx.async_eval  # mlx leaves it untyped


@dataclass
class Pending:
    """A step under evaluation: the rows that get a token, the array [rows] that will hold the tokens,

    and the arrays of the caches of rows that are still in prefill.
    """

    num_prefill: int
    decoded: bool
    rows: list[Sequence] = field(default_factory=list)
    tokens: mx.array | None = None
    chunk: list[mx.array] = field(default_factory=list)
    begun_at: float = field(default_factory=time.monotonic)

    def read(self) -> list[int]:
        """The tokens, one a row; waits for them."""
        return [] if self.tokens is None else cast(list[int], self.tokens.tolist())

    def settle(self) -> None:
        """Wait for the chunks, and give the memory of their intermediate arrays back."""
        if self.chunk:
            mx.eval(self.chunk)
            mx.clear_cache()


def run(model: Any, step: Step) -> Pending:
    """Build the graph of `step` and start its evaluation."""
    pending = Pending(step.num_prefill, bool(step.decode))
    ids: list[mx.array] = [row.token for row in step.decode]
    parts: list[tuple[list[Any], int]] = [(row.caches or [], 1) for row in step.decode]
    places = list(range(len(step.decode)))
    pending.rows += step.decode
    for row, count in step.prefill:
        end = row.num_cached
        if row.num_to_prefill == 0:
            places.append(len(parts))
            pending.rows.append(row)
        ids.append(mx.array(list(row.prompt[end - count : end]), dtype=mx.int32))
        parts.append((row.caches or [], count))
    batch = Batch(ids[0] if len(ids) == 1 else mx.concatenate(ids), parts)
    hidden = model(batch)
    if places:
        pending.tokens = _draw(model.head(batch.last(hidden, places)), pending.rows)
    for row, _ in step.prefill:
        if row.num_to_prefill > 0:
            pending.chunk += [array for cache in row.caches or [] for array in cache.arrays()]
    _async_eval(*pending.chunk, *([] if pending.tokens is None else [pending.tokens]))
    return pending


def _draw(logits: mx.array, rows: list[Sequence]) -> mx.array:
    """The next token of each row from its `logits` [R, V] -> [R]; rows keep theirs for the next step."""
    drawn = []
    for place, row in enumerate(rows):
        index = row.num_resumed + row.num_sampled - 1
        token = sample(logits[place], row.sampling, row.seed, index).reshape(1)
        row.token = token.astype(mx.int32)
        drawn.append(token)
    return drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)
