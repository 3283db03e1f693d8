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


def measure(model: Path, rows: Sequence[Sequence[int]], reference: Path | None, tell: Tell) -> Measured:
    """Run `rows` of two tokens or more through both. Raises `Refused` (unsupported, bad_checkpoint).

    `tell(done, total)` in layers of both; it may raise to stop. In memory: a layer, embeddings, heads, hidden states.
    """
    checkpoints = [inspect(path) for path in (reference, model) if path is not None]
    runs = _run_all(checkpoints, rows, tell)
    targets = [token for row in rows for token in (*row[1:], -1)]
    tally = [_Tally() for _ in runs]
    apart: list[float] = []
    same = 0
    for begin in range(0, len(targets), CHUNK):
        places = [place for place in range(begin, min(begin + CHUNK, len(targets))) if targets[place] >= 0]
        if not places:
            continue
        wanted, where = mx.array([targets[place] for place in places]), mx.array(places)
        logits = [head(hidden[where]) for hidden, head in runs]
        for one, found in zip(tally, logits, strict=True):
            one.add(surprise(found, wanted))
        if len(logits) == 2:
            apart += divergence(*map(log_probabilities, logits)).tolist()  # type: ignore[arg-type]
            top = mx.argmax(logits[0], axis=-1) == mx.argmax(logits[1], axis=-1)
            same += int(np.array(top).sum())
    own = perplexity(tally[-1].values)
    if reference is None:
        return Measured(own)
    return Measured(own, perplexity(tally[0].values), summary(apart, same))


class _Tally:
    """The surprise of every token."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, found: mx.array) -> None:
        self.values += found.tolist()  # type: ignore[arg-type]


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
