"""KV caches of ended sequences, kept in memory so that the next prompt that begins alike need not run again.

An entry is the ids of a sequence, one cache per layer at its end, and checkpoints: the states that some layers were in
after fewer tokens. Layers that keep every token can go back to any of them; a recurrent layer cannot go back at all,
and one with a sliding window only as far as it still holds what is seen there. So where a model has such layers a
prompt can branch off at the end of an entry and at its checkpoints, else anywhere.

`take` does not consume: caches are cloned (arrays are shared until one side writes), so that many conversations can
branch off one prefix. Capped in bytes, least recently used entries go first. Everything here runs on the engine thread.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from worker.cache.chain import BLOCK

MIN_TOKENS = 16
"""Shorter prefixes are quicker to run again than to look after."""

MOST_CHECKPOINTS = 4
"""Of one entry; the oldest but the first goes when there are more."""

TAIL = 8
"""Tokens at the end of a prompt that the next one of the conversation may not share."""

KEPT_LOOKUPS = 64

Checkpoint = list[Any]
"""One entry per layer: its cache after so many tokens, None for a layer that can go back by itself."""


class Lookup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a prompt was reused as far as it was.

    `from_disk`: of `reused`, those that were read from disk. `common`: the longest common beginning with anything kept.
    `differs`: ids there, of what was kept and of the prompt (-1: nothing follows). `reason`: in words.
    """

    prompt_tokens: int
    reused: int
    common: int
    reason: str
    differs: tuple[int, int] = (-1, -1)
    from_disk: int = 0


@dataclass(eq=False)
class Entry:
    """The ids whose keys and values `caches` hold, and their bytes, those of the checkpoints included."""

    ids: list[int]
    regime: Hashable  # of the rotation of keys; see `DecoderModel.regime`
    caches: list[Any]
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    nbytes: int = 0
    namespace: str = ""  # of the adapters that computed them

    def __post_init__(self) -> None:
        held = [*self.caches, *(cache for point in self.checkpoints.values() for cache in point if cache)]
        self.nbytes = sum(cache.nbytes for cache in held)

    def reach(self, length: int) -> int:
        """The most tokens, up to `length`, after which the caches can be had."""
        surplus = len(self.ids) - length
        if surplus <= 0:
            return len(self.ids)
        if all(cache.can_trim(surplus) for cache in self.caches):
            return length
        return max((at for at in self.checkpoints if at <= length), default=0)

    def branch(self, length: int, planned: int) -> "Branch":
        """Caches after `length` tokens (`reach` says which) for a sequence of `planned`, with no room beyond."""
        surplus = len(self.ids) - length
        point: Checkpoint = [None] * len(self.caches)
        if any(not cache.can_trim(surplus) for cache in self.caches):
            point = self.checkpoints[length]
        branched = []
        for cache, instead in zip(self.caches, point, strict=True):
            clone = (instead or cache).clone()
            if instead is None and surplus:
                clone.trim(surplus)
            clone.planned = planned
            clone.cut()
            branched.append(clone)
        points = {at: point for at, point in self.checkpoints.items() if at <= length}
        if length not in points and not all(cache.goes_back for cache in branched):
            points[length] = checkpoint_of(branched)
        return Branch(branched, points)


@dataclass(frozen=True)
class Branch:
    """What a row starts with: its caches, and the checkpoints on the way to where they are."""

    caches: list[Any]
    checkpoints: dict[int, Checkpoint]


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


def checkpoint_of(caches: Sequence[Any]) -> Checkpoint:
    """What has to be kept of caches as they are now, to come back here later."""
    return [None if cache.goes_back else cache.clone() for cache in caches]


def marks_of(length: int, reused: int, common: int) -> list[int]:
    """Where on a prompt of `length` tokens, of which `reused` are there, checkpoints are worth taking.

    Near its end, where the next turn of the conversation goes on (templates write the last few tokens anew), and where
    another prompt was seen to branch off (`common`): what they share is likely to be shared again.
    """
    near_end = (length - TAIL) // BLOCK * BLOCK
    return sorted({mark for mark in (near_end, common) if reused + MIN_TOKENS <= mark < length})


class PrefixCache:
    """A list ordered by last use, newest last. `regime`: see `DecoderModel.regime`.

    `namespace` of a call: what adapters computed it, or would; nothing of another one is ever found.
    """

    def __init__(self, max_bytes: int, regime: Callable[[int], Hashable]) -> None:
        self.max_bytes = max_bytes
        self.regime = regime
        self.nbytes = 0
        self.lookups: deque[Lookup] = deque(maxlen=KEPT_LOOKUPS)
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, length: int, namespace: str = "") -> Hashable:
        """What a kept sequence of that length and one that may go on from it have to have in common."""
        regime = self.regime(length)
        return (namespace, regime) if namespace else regime

    def take(self, prompt: Sequence[int], namespace: str = "") -> tuple[Branch | None, Lookup]:
        """-> (caches, what was found): the longest usable beginning of `prompt`, its last token left out.

        Nothing usable gives None; `reused` of the lookup is the number of tokens in the caches. It is the caller's to
        put it among `lookups`, when he knows whether the disk has more.
        """
        ids = list(prompt)
        best, reused, near, common = self._best(ids, namespace)
        lookup = _explained(ids, near, common, reused, self.key(len(ids), namespace))
        if best is None:
            return None, lookup
        self._use(best)
        return best.branch(reused, len(ids)), lookup

    def put(
        self,
        ids: list[int],
        caches: list[Any],
        checkpoints: Mapping[int, Checkpoint] | None = None,
        namespace: str = "",
    ) -> None:
        """Keep `caches`, which hold exactly `ids`. Entries that they make superfluous go, and where one makes them
        superfluous (a branch that was left before it ran a step) that one is used instead.
        """
        if len(ids) < MIN_TOKENS:
            return
        regime = self.key(max(len(ids), caches[0].planned), namespace)
        points = {at: point for at, point in sorted((checkpoints or {}).items()) if at < len(ids)}
        while len(points) > MOST_CHECKPOINTS:
            del points[list(points)[1]]
        for entry in self._entries:
            if entry.regime == regime and _covers(entry, ids, points):
                self._use(entry)
                return
        for cache in (*caches, *(each for point in points.values() for each in point if each)):
            cache.compact()  # what it holds of others' memory would be counted nowhere
        new = Entry(ids, regime, caches, points, namespace=namespace)
        if new.nbytes > self.max_bytes:
            return
        for entry in list(self._entries):
            if entry.regime == regime and _covers(new, entry.ids, entry.checkpoints):
                self._drop(entry)
        self._entries.append(new)
        self.nbytes += new.nbytes
        self.resize(self.max_bytes)

    def resize(self, max_bytes: int) -> None:
        """Another cap; what is over it goes."""
        self.max_bytes = max_bytes
        while self.nbytes > max_bytes:
            self._drop(self._entries[0])

    def newest_first(self) -> list[Entry]:
        """All entries, the one last used first."""
        return self._entries[::-1]

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _use(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes

    def _best(self, ids: list[int], namespace: str) -> tuple[Entry | None, int, Entry | None, int]:
        """-> (the entry that saves most, tokens of it to be used, the entry most alike, tokens in common)."""
        best: Entry | None = None
        near: Entry | None = None
        reused, most = 0, 0
        regime = self.key(len(ids), namespace)
        for entry in self._entries:
            if entry.namespace != namespace:
                continue
            common = common_length(entry.ids, ids)
            if common > most:
                near, most = entry, common
            if entry.regime == regime and common >= MIN_TOKENS:
                reach = entry.reach(min(common, len(ids) - 1))
                if reach >= MIN_TOKENS and reach > reused:
                    best, reused = entry, reach
        return best, reused, near, most


def _covers(entry: Entry, ids: list[int], checkpoints: Mapping[int, Checkpoint]) -> bool:
    """Whether `entry` can stand in for one of these wherever that could be branched off."""
    if common_length(entry.ids, ids) < len(ids):
        return False
    return all(entry.reach(at) == at for at in (len(ids), *checkpoints))


def _explained(ids: list[int], near: Entry | None, common: int, reused: int, regime: Hashable) -> Lookup:
    if near is None:
        return Lookup(len(ids), reused, 0, "nothing kept begins like it")
    if common == len(ids) and reused == common - 1:
        return Lookup(len(ids), reused, common, "all of it was kept")
    kept = near.ids[common] if common < len(near.ids) else -1
    asked = ids[common] if common < len(ids) else -1
    differs = (kept, asked)
    if reused >= common and kept == -1:
        return Lookup(len(ids), reused, common, "it goes on from what was kept", differs)
    if near.regime != regime:
        reason = "what was kept was rotated for a sequence of another length"
    elif common < MIN_TOKENS:
        reason = f"{common} tokens in common are too few to be worth it"
    elif reused < common:
        reason = f"the states of this model can be taken up after {reused} tokens, not after {common}"
    else:
        reason = f"the first token that differs is number {common}"
    return Lookup(len(ids), reused, common, reason, differs)


def asked_of_disk(lookup: Lookup, tokens: int, problem: str) -> Lookup:
    """The lookup once the disk has been read: `tokens` came from there, 0 = no more than memory has.

    `problem`: why it was less than was found by name, "" = it was not.
    """
    if not tokens:
        return replace(lookup, reason=problem or lookup.reason)
    reason = f"{tokens} tokens were on disk" + (f"; then {problem}" if problem else "")
    differs = lookup.differs if lookup.common >= tokens else (-1, -1)
    return Lookup(lookup.prompt_tokens, tokens, max(lookup.common, tokens), reason, differs, tokens)
