"""KV caches of ended sequences, kept so that the next prompt that begins alike need not run again.

Entries are whole: the ids and one cache per layer. `take` does not consume: the caches are cloned (arrays are
shared, writes are not), so that many conversations can branch off one prefix. Capped in bytes, least recently
used entries go first. An entry that an earlier worker left on disk is only described until it is first used.
Everything here runs on the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_TOKENS = 16
"""Shorter prefixes are quicker to run again than to look after."""


@dataclass
class Entry:
    """The ids whose keys and values `caches` hold, and their bytes.

    `thaw`, where it is there, has to fill the caches before they are used; False: what they held is lost. `file`:
    where they lie on disk as well.
    """

    ids: list[int]
    caches: list[Any]
    nbytes: int
    planned: int  # length of the sequence the keys were rotated for
    thaw: Callable[[], bool] | None = None
    file: Path | None = None


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
        while (found := self._best(ids)) is not None:
            entry, length = found
            if entry.thaw is not None and not entry.thaw():
                self._drop(entry)
                continue
            entry.thaw = None
            self._entries.remove(entry)
            self._entries.append(entry)
            return self._branch(entry, length, len(ids)), length
        return None, 0

    def put(self, ids: list[int], caches: list[Any]) -> None:
        """Keep `caches`, which hold exactly `ids`. Entries that they make superfluous go."""
        if len(ids) < MIN_TOKENS:
            return
        for cache in caches:
            cache.compact()
        nbytes = sum(cache.nbytes for cache in caches)
        if nbytes > self.max_bytes:
            return
        new = Entry(ids, caches, nbytes, max(len(ids), caches[0].planned))
        for entry in list(self._entries):
            if self.covers(new, entry.ids, entry.planned):
                self._drop(entry)
        self.adopt(new)

    def adopt(self, entry: Entry) -> None:
        """Keep an entry as the one last used."""
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self.resize(self.max_bytes)

    def resize(self, max_bytes: int) -> None:
        """Another cap; what is over it goes."""
        self.max_bytes = max_bytes
        while self.nbytes > max_bytes:
            self._drop(self._entries[0])

    def newest_first(self) -> list[Entry]:
        """All entries, the one last used first."""
        return self._entries[::-1]

    def covers(self, entry: Entry, ids: list[int], planned: int) -> bool:
        """Whether `entry` can stand in for one of `ids`."""
        length = common_length(ids, entry.ids)
        trimmable = all(cache.can_trim(1) for cache in entry.caches)
        return (
            length == len(ids)
            and (trimmable or length == len(entry.ids))
            and self._same_kv(planned, entry.planned)
        )

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes

    def _best(self, ids: list[int]) -> tuple[Entry, int] | None:
        """The entry that saves most, and the tokens of it to be used."""
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
        return None if best is None else (best, best_length)

    def _branch(self, entry: Entry, length: int, planned: int) -> list[Any]:
        """Caches of the first `length` tokens of an entry, for a sequence of `planned`, with no room beyond."""
        caches = [cache.clone() for cache in entry.caches]
        for cache in caches:
            cache.planned = planned
            if length < len(entry.ids):
                cache.trim(len(entry.ids) - length)
            cache.cut()
        return caches
