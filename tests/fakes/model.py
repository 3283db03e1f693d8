"""A model without weights for tests of the engine: the next token is a fixed function of the last one.

Its caches count what they are given, so that a test sees every token that was run, and in which pieces.
"""

from collections.abc import Callable

import mlx.core as mx

from worker.layers.batch import Batch


class CountingCache:
    """A cache that only remembers ids."""

    goes_back = True

    def __init__(self, ids: list[int] | None = None) -> None:
        self.ids = list(ids or [])
        self.planned = 0

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.ids)

    def can_trim(self, count: int) -> bool:
        return 0 <= count <= len(self.ids)

    def trim(self, count: int) -> None:
        del self.ids[len(self.ids) - count :]

    def compact(self) -> None:
        pass

    def cut(self) -> None:
        pass

    def clone(self) -> "CountingCache":
        return CountingCache(self.ids)

    def arrays(self) -> list[mx.array]:
        return []


class SuccessorModel:
    """After token t comes `follow(t)` (by default t + 1), with certainty. Vocabulary of `size` tokens."""

    def __init__(self, size: int = 100, follow: Callable[[int], int] | None = None) -> None:
        self.size = size
        self.follow = follow or (lambda token: (token + 1) % size)
        self.calls: list[int] = []  # lengths of what was run of each row, in order
        table = mx.eye(size)[mx.array([self.follow(t) for t in range(size)])] * 50.0
        self._table = table

    def __call__(self, batch: Batch) -> mx.array:
        ids = batch.tokens.tolist()
        for row in batch.rows:
            self.calls.append(row.length)
            for cache in row.caches:
                cache.ids += ids[row.begin : row.end]
        return self._table[batch.tokens]

    def head(self, hidden: mx.array) -> mx.array:
        return hidden

    def make_caches(self, length: int = 0) -> list[CountingCache]:
        return [CountingCache()]

    def regime(self, length: int) -> int:
        return 0
