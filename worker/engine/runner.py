"""One forward pass of a step; the only caller of the model. Graphs stay lazy, nothing is read here.

All tokens of a step, those of decoding rows and pieces of prompts, are one pass and one `mx.async_eval`; where a row
has a grammar, the draw is a second one, built while the pass is under way and the tokens before have been read.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from worker.adapters.selection import Selection
from worker.engine.grammar import masks
from worker.engine.processors import newest
from worker.engine.sampling import Draw, draw
from worker.engine.scheduler import Step
from worker.engine.sequence import Sequence, Status
from worker.layers.batch import Batch

_async_eval: Any = mx.async_eval  # mlx leaves it untyped


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a drawn token and of the likeliest in its place, (id, logprob), the best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Pending:
    """A step under evaluation: the rows that get a token, what is drawn for them, or the logits [rows, V] that it will
    be drawn from, and the arrays of the caches of rows that are still in prefill.
    """

    num_prefill: int
    decoded: bool
    rows: list[Sequence] = field(default_factory=list)
    logits: mx.array | None = None  # until they are drawn from
    drawn: Draw | None = None
    chunk: list[mx.array] = field(default_factory=list)
    vectors: list[tuple[Sequence, mx.array]] = field(default_factory=list)  # of texts that are through
    begun_at: float = field(default_factory=time.monotonic)

    def read(self) -> list[int]:
        """The tokens, one a row; waits for them. `sampling.BAD`: there is none."""
        return [] if self.drawn is None else cast(list[int], self.drawn.tokens.tolist())

    def scores(self) -> dict[int, Scores]:
        """By place in `rows`, of those that ask for them."""
        found: dict[int, Scores] = {}
        for told in [] if self.drawn is None else self.drawn.told:
            drawn = cast(list[float], told.drawn.tolist())
            tops: list[list[tuple[int, float]]] = [[]] * len(drawn)
            if told.ids is not None and told.values is not None:
                ids = cast(list[list[int]], told.ids.tolist())
                values = cast(list[list[float]], told.values.tolist())
                tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            for place, logprob, top in zip(told.places, drawn, tops, strict=True):
                count = self.rows[place].sampling.logprobs or 0
                found[place] = Scores(logprob, [(i, value) for i, value in top[:count] if value > -math.inf])
        return found

    def settle(self) -> None:
        """Wait for the chunks, and give the memory of their intermediate arrays back."""
        if self.chunk:
            mx.eval(self.chunk)
            mx.clear_cache()


def start_waits() -> bool:
    """Whether `start` comes back only when the step is nearly through: on CPU mlx runs few operations ahead."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def build(model: Any, step: Step, selection: Selection | None = None) -> Pending:
    """The graph of `step`, up to the draw, or to the logits where a row has a grammar. `start` follows.

    `selection`: of the adapters that the rows run with.
    """
    pending = Pending(step.num_prefill, bool(step.decode))
    ids: list[mx.array] = [newest(step.decode)] if step.decode else []
    parts: list[tuple[list[Any], int]] = [(row.caches or [], 1) for row in step.decode]
    places = list(range(len(step.decode)))
    pending.rows += step.decode
    for row, count in step.prefill:
        end = row.num_cached
        if row.num_to_prefill == 0 and row.pooler is None:
            places.append(len(parts))
            pending.rows.append(row)
        ids.append(mx.array(list(row.prompt[end - count : end]), dtype=mx.int32))
        parts.append((row.caches or [], count))
    batch = Batch(ids[0] if len(ids) == 1 else mx.concatenate(ids), parts)
    stacks = [row.adapters for row in step.decode] + [row.adapters for row, _ in step.prefill]
    if selection is not None:
        selection.choose(list(zip(stacks, (row.length for row in batch.rows), strict=True)))
    hidden = model(batch)
    if places:
        if selection is not None:
            selection.choose([(stacks[place], 1) for place in places])
        pending.logits = model.head(batch.last(hidden, places))
    for part, (row, _) in zip(batch.rows[len(step.decode) :], step.prefill, strict=True):
        if row.pooler is not None:
            row.pooler.take(hidden[part.begin : part.end])
            if row.num_to_prefill == 0:
                pending.vectors.append((row, row.pooler.result()))
            else:
                pending.chunk += row.pooler.arrays()
        if row.num_to_prefill > 0:
            pending.chunk += [array for cache in row.caches or [] for array in cache.arrays()]
    if all(row.constraint is None for row in pending.rows):
        _draw(pending)
    return pending


def start(pending: Pending) -> None:
    """Start the evaluation of what was built; `finish` follows where a row has a grammar."""
    drawn = [] if pending.drawn is None else pending.drawn.arrays()
    vectors = (vector for _, vector in pending.vectors)
    _async_eval(*pending.chunk, *drawn, *vectors, *([] if pending.logits is None else [pending.logits]))


def finish(pending: Pending) -> None:
    """Draw the tokens of a step that has not been drawn from yet, and start that.

    Every token before them has been read where a row has a grammar. Rows that ended meanwhile are left out.
    """
    if pending.logits is not None:
        _draw(pending)
        if pending.drawn is not None:
            _async_eval(*pending.drawn.arrays())


def _draw(pending: Pending) -> None:
    logits, pending.logits = pending.logits, None
    if logits is None:
        return
    alive = [place for place, row in enumerate(pending.rows) if row.status is not Status.FINISHED]
    if len(alive) < len(pending.rows):
        pending.rows = [pending.rows[place] for place in alive]
        if not alive:
            return
        logits = logits[mx.array(alive)]
    held = {n: row.constraint for n, row in enumerate(pending.rows) if row.constraint is not None}
    allowed = dict(zip(held, masks(list(held.values()), logits.shape[-1]), strict=True)) if held else None
    pending.drawn = draw(logits, pending.rows, allowed)
    for place, row in enumerate(pending.rows):
        row.token = (pending.drawn.tokens, place)
