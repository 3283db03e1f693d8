"""One forward pass of a step; the only caller of the model. Graphs stay lazy, nothing is read here.

Rows run one after the other inside one evaluation: a step is one call of `mx.async_eval`, whatever its rows.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from worker.engine.sampling import sample
from worker.engine.scheduler import Step
from worker.engine.sequence import Sequence

_async_eval: Any = mx.async_eval  # mlx leaves it untyped


@dataclass
class Pending:
    """A step under evaluation: the rows that get a token, the array [rows] that will hold the tokens,

    and the KV arrays of a prefill chunk that samples nothing.
    """

    rows: list[Sequence] = field(default_factory=list)
    tokens: mx.array | None = None
    chunk: list[mx.array] = field(default_factory=list)

    def read(self) -> list[int]:
        """The tokens, one a row; waits for them."""
        return [] if self.tokens is None else cast(list[int], self.tokens.tolist())


def run(model: Any, step: Step) -> Pending:
    """Build the graph of `step` and start its evaluation; decoding rows are evaluated first."""
    pending = Pending()
    drawn: list[mx.array] = []
    for row in step.decode:
        drawn.append(_sampled(model, row, row.token))
        pending.rows.append(row)
    if step.prefill is not None:
        row = step.prefill
        end = row.num_cached
        ids = mx.array([list(row.prompt[end - step.num_prefill : end])], dtype=mx.int32)
        if row.num_to_prefill == 0:
            drawn.append(_sampled(model, row, ids))
            pending.rows.append(row)
    if drawn:
        pending.tokens = mx.concatenate(drawn) if len(drawn) > 1 else drawn[0]
        _async_eval(pending.tokens)
    if step.prefill is not None and step.prefill.num_to_prefill > 0:
        assert step.prefill.caches is not None
        model(ids, step.prefill.caches)
        pending.chunk = [array for cache in step.prefill.caches for array in cache.arrays()]
        _async_eval(*pending.chunk)
    return pending


def wait(pending: Pending) -> None:
    """Wait for the chunk of a step, and give the memory of its intermediate arrays back."""
    mx.eval(pending.chunk)
    mx.clear_cache()


def _sampled(model: Any, row: Sequence, ids: mx.array) -> mx.array:
    """Run `ids` [1, L] of one row and draw its next token -> [1]; the head sees the last position only."""
    hidden = model(ids, row.caches)
    logits = model.head(hidden[:, -1, :])
    index = row.num_resumed + row.num_sampled - 1
    token = sample(logits[0], row.sampling, row.seed, index).reshape(1)
    row.token = token[None].astype(mx.int32)
    return token
