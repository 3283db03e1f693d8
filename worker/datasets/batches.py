"""Which examples go together, in which order, and which of their tokens count.

The order comes from numpy's Mersenne twister, as mlx-lm's does; its state is all there is to a position in the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.datasets.examples import Example

PAD_TO = 32


@dataclass(frozen=True)
class Packed:
    """Rows of one pass. `places`: of the tokens in the flat batch that count, `targets`: what comes after each,
    `spans`: where each row's begin and end among them, `answers` where those of its response do."""

    rows: list[list[int]]
    places: list[int]
    targets: list[int]
    spans: list[tuple[int, int]]
    answers: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def counts_all(self) -> bool:
        return len(self.places) == self.tokens


def pack(examples: Sequence[Example], *, response: bool, padded_to: int = 0) -> Packed:
    """The rows of a pass. The last token of a text predicts nothing and is left out; where texts are `padded_to` more
    tokens with mlx-lm, the 0 behind a shorter one is a target too.
    """
    rows: list[list[int]] = []
    places: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int]] = []
    answers: list[tuple[int, int]] = []
    begin = 0
    for one in examples:
        tokens = [*one.tokens, 0] if len(one.tokens) < padded_to else one.tokens
        first, at = max(1, one.response if response else 1), len(targets)
        rows.append(tokens[:-1])
        places += range(begin + first - 1, begin + len(tokens) - 1)
        targets += tokens[first:]
        spans.append((at, len(targets)))
        answers.append((at + max(1, one.response) - first, len(targets)))
        begin += len(tokens) - 1
    return Packed(rows, places, targets, spans, answers)


def padded_width(examples: Sequence[Example], most: int) -> int:
    """Tokens of a row of mlx-lm's batch of these."""
    longest = max(len(one.tokens) for one in examples)
    return min(1 + PAD_TO * -(-longest // PAD_TO), most)


def group(lengths: Sequence[int], size: int, *, like_mlx_lm: bool) -> list[list[int]]:
    """Examples of like length together, `size` of them, the last group perhaps smaller.

    mlx-lm leaves rows in their order (it sorts by how many fields they have) and those beyond full groups out.
    """
    count = len(lengths)
    if like_mlx_lm:
        return [list(range(at, at + size)) for at in range(0, count - size + 1, size)]
    order = sorted(range(count), key=lengths.__getitem__)
    return [order[at : at + size] for at in range(0, count, size)]


@dataclass
class Order:
    """Endless passes over `count` groups, each in another order."""

    count: int
    random: np.random.RandomState
    queue: list[int] = field(default_factory=list)

    def next(self) -> int:
        if not self.queue:
            self.queue = [int(one) for one in self.random.permutation(self.count)]
        return self.queue.pop(0)

    def skip(self, count: int) -> None:
        """Draw what mlx-lm draws for an evaluation over `count` groups, so that training goes on as there."""
        self.random.permutation(count)

    def state(self) -> dict[str, Any]:
        """For `restore`; plain values."""
        name, keys, position, has_gauss, gauss = self.random.get_state(legacy=True)
        return {
            "random": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
            "queue": list(self.queue),
        }

    def restore(self, state: dict[str, Any]) -> None:
        name, keys, position, has_gauss, gauss = state["random"]
        self.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
        self.queue = [int(one) for one in state["queue"]]


def order_of(count: int, seed: int) -> Order:
    """From the beginning."""
    return Order(count, np.random.RandomState(seed % 2**32))
