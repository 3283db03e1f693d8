"""A model on a text, alone or beside the model that it was made of."""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from shared.checkpoint import Checkpoint, inspect
from worker.measure.scores import (
    Divergence,
    Perplexity,
    divergence,
    log_probabilities,
    perplexity,
    summary,
    surprise,
)
from worker.measure.streamed import Head, final_states, plain_decoder

CHUNK = 128
"""Positions whose logits exist at once."""

Tell = Callable[[int, int], None]


class Measured(msgspec.Struct, frozen=True):
    """Of a model, and of the reference where there is one."""

    perplexity: Perplexity
    reference: Perplexity | None = None
    divergence: Divergence | None = None


class Comparison:
    """What one or two models say of the same tokens, taken in piece by piece. `heads`: the reference's first."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = heads
        self._surprises: list[list[float]] = [[] for _ in heads]
        self._apart: list[float] = []
        self._same = 0

    def add(self, rows: Sequence[Sequence[int]], hidden: Sequence[mx.array]) -> None:
        """Final hidden states [T, D] of `rows`, end to end, by each model."""
        targets = [token for row in rows for token in (*row[1:], -1)]
        known = [place for place, target in enumerate(targets) if target >= 0]
        for begin in range(0, len(known), CHUNK):
            places = known[begin : begin + CHUNK]
            wanted, where = mx.array([targets[place] for place in places]), mx.array(places)
            logits = [head(states[where]) for head, states in zip(self._heads, hidden, strict=True)]
            for found, one in zip(self._surprises, logits, strict=True):
                found += np.array(surprise(one, wanted)).tolist()
            if len(logits) == 2:
                self._apart += np.array(divergence(*map(log_probabilities, logits))).tolist()
                top = mx.argmax(logits[0], axis=-1) == mx.argmax(logits[1], axis=-1)
                self._same += int(np.array(top).sum())

    def result(self) -> Measured:
        """Of all that was taken in."""
        own = perplexity(self._surprises[-1])
        if len(self._heads) == 1:
            return Measured(own)
        return Measured(own, perplexity(self._surprises[0]), summary(self._apart, self._same))


def measure(model: Path, rows: Sequence[Sequence[int]], reference: Path | None, tell: Tell) -> Measured:
    """Run `rows` of two tokens or more through both. Raises `Refused` (unsupported, bad_checkpoint).

    `tell(done, total)` in layers of both; it may raise to stop. In memory: a layer, embeddings, heads, hidden states.
    """
    checkpoints = [inspect(path) for path in (reference, model) if path is not None]
    runs = _run_all(checkpoints, rows, tell)
    comparison = Comparison([head for _, head in runs])
    comparison.add(rows, [hidden for hidden, _ in runs])
    return comparison.result()


def _run_all(
    checkpoints: Sequence[Checkpoint], rows: Sequence[Sequence[int]], tell: Tell
) -> list[tuple[mx.array, Head]]:
    """Hidden states [T, D] of all rows, and the head, of each model."""
    found: list[tuple[mx.array, Head]] = []
    for place, checkpoint in enumerate(checkpoints):
        decoder = plain_decoder(checkpoint)
        count = len(checkpoints)

        def told(done: int, total: int, place: int = place, count: int = count) -> None:
            tell(place * total + done, count * total)

        hidden = mx.concatenate(list(final_states(decoder, rows, told)))
        mx.eval(hidden)
        found.append((hidden, decoder.head))
    return found
