"""KV caches of ended sequences, kept so that the next prompt that begins alike need not run again.

Entries are whole: the ids and one cache per layer. `take` does not consume: the caches are cloned (arrays are
shared, writes are not), so that many conversations can branch off one prefix. Capped in bytes, least recently
used entries go first. Everything here runs on the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIN_TOKENS = 16
"""Shorter prefixes are quicker to run again than to look after."""


@dataclass
class Entry:
    """The ids whose keys and values `caches` hold, and their bytes."""

    ids: list[int]
    caches: list[Any]
    nbytes: int
    planned: int  # length of the sequence the keys were rotated for


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by bisection over slice comparisons (which run in C)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixCache:
    """A list ordered by last use, newest last.

    `same_kv(length, other)`: whether keys made for a sequence of one length serve one of another (rope kinds
    that depend on the length).
    """

    def __init__(self, max_bytes: int, same_kv: Callable[[int, int], bool]) -> None:
        self.max_bytes = max_bytes
        self._same_kv = same_kv
        self.nbytes = 0
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, prompt: Sequence[int]) -> tuple[list[Any] | None, int]:
        """-> (caches, tokens in them): the longest usable beginning of `prompt`, its last token left out.

        Nothing usable gives (None, 0).
        """
        ids = list(prompt)
        best: Entry | None = None
        best_length = MIN_TOKENS - 1
        for entry in self._entries:
            length = min(common_length(entry.ids, ids), len(ids) - 1)
            surplus = len(entry.ids) - length
            if not self._same_kv(entry.planned, len(ids)):
                continue
            if length > best_length and (
                surplus == 0 or all(cache.can_trim(surplus) for cache in entry.caches)
            ):
                best, best_length = entry, length
        if best is None:
            return None, 0
        self._entries.remove(best)
        self._entries.append(best)
        caches = [cache.clone() for cache in best.caches]
        surplus = len(best.ids) - best_length
        for cache in caches:
            cache.planned = len(ids)
            if surplus:
                cache.trim(surplus)
        return caches, best_length

    def put(self, ids: list[int], caches: list[Any]) -> None:
        """Keep `caches`, which hold exactly `ids`. Entries that they make superfluous go."""
        if len(ids) < MIN_TOKENS:
            return
        for cache in caches:
            cache.compact()
        nbytes = sum(cache.nbytes for cache in caches)
        if nbytes > self.max_bytes:
            return
        trimmable = all(cache.can_trim(1) for cache in caches)
        for entry in list(self._entries):
            length = common_length(entry.ids, ids)
            superseded = length == len(entry.ids) and (trimmable or length == len(ids))
            if superseded and self._same_kv(entry.planned, max(len(ids), caches[0].planned)):
                self._drop(entry)  # the new one can stand in for it
        planned = max(len(ids), caches[0].planned)
        self._entries.append(Entry(ids, caches, nbytes, planned))
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._drop(self._entries[0])

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes
