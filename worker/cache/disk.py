"""A folder where the prefix cache outlives its worker: a draining one writes it, the next one finds it.

What is found is only described at first (`disk_file.describe`), so that loading costs reading headers; a file stays
until a later spill needs its room. A spill is bounded in time and bytes, and whatever goes wrong with it is a line in
the log: kept prompts are a matter of speed alone. Everything here runs on the engine thread.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

from shared.checkpoint import Checkpoint
from shared.logs import event
from worker.cache import disk_file
from worker.cache.disk_file import About, Damaged, Write
from worker.cache.prefix import Entry, PrefixCache

log = logging.getLogger("cache")

FORMAT = 2
"""To be raised when the meaning of a file changes: older ones are then other models' to us."""

SPILL_S = 10.0
"""A drain has 30 s in all, and the answers in flight come first."""

_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(disk_file.SUFFIX))


def identity_of(checkpoint: Checkpoint, *facts: object) -> str:
    """Of the KV that a model computes: its files by name, size and time of change, and `facts` (dtype, device).

    The chat template is none of it: the ids of an entry say what was asked. Raises OSError.
    """
    digest = blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json", *(shard.file for shard in checkpoint.shards)):
        stat = (Path(checkpoint.path) / name).stat()
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    digest.update(repr((FORMAT, *facts)).encode())
    return digest.hexdigest()


@dataclass
class Found:
    """A file of the folder, in order and of this model."""

    path: Path
    about: About
    nbytes: int  # of the arrays
    size: int  # of the file
    changed: int


class Stopped(Exception):
    """A spill that has to end before all is written; says why."""


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class Spill:
    """The folder of one model. At most `max_bytes` lie there, `floor_bytes` of the disk stay free.

    `limit_s`, `put` and `free_bytes` are for tests.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        *,
        max_bytes: int,
        floor_bytes: int,
        limit_s: float = SPILL_S,
        put: Write = os.write,
        free_bytes: Callable[[Path], int] = _free_bytes,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self._max_bytes, self._floor_bytes = max_bytes, floor_bytes
        self._limit_s = limit_s
        self._put = put
        self._free_bytes = free_bytes

    def restore(self, prefix: PrefixCache) -> int:
        """Let the prefix cache know of what lies here, newest first, up to its cap -> bytes."""
        if not prefix.max_bytes:
            return 0
        try:
            found = self._scan()
        except OSError as error:
            event(log, "spill.unreadable", level=logging.WARNING, folder=str(self.folder), reason=str(error))
            return 0
        entries: list[Entry] = []
        total = 0
        for one in found:
            if total + one.nbytes <= prefix.max_bytes:
                total += one.nbytes
                entries.append(self._entry(one))
        for entry in reversed(entries):
            prefix.adopt(entry)
        return total

    def write(self, prefix: PrefixCache, should_stop: Callable[[], bool]) -> int:
        """Write what is not here yet, newest first -> bytes that are here now. Never raises for a disk's faults.

        `should_stop`: the engine is wanted for something else.
        """
        entries = prefix.newest_first()
        if not entries:
            return 0
        until = time.monotonic() + self._limit_s

        def check() -> None:
            if should_stop():
                raise Stopped("the worker goes on serving")
            if time.monotonic() >= until:
                raise Stopped(f"not done within {self._limit_s:g} s")

        room = _Room(self._max_bytes)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            room.open(self._scan(), entries)
            began = time.time_ns()
            for rank, entry in enumerate(entries):
                check()
                self._keep(entry, room, prefix, check)
                if entry.file is not None and room.holds(entry.file):
                    age = began - rank * 1_000_000
                    os.utime(entry.file, ns=(age, age))
            _fsync(self.folder)
        except (OSError, Stopped) as error:
            event(log, "spill.stopped", level=logging.WARNING, folder=str(self.folder), reason=str(error))
        return room.trim()

    def _keep(self, entry: Entry, room: "_Room", prefix: PrefixCache, check: Callable[[], None]) -> None:
        """See that one entry lies here, unless there is no room for it."""
        if entry.file is not None and room.keep(entry.file):
            return
        if entry.thaw is not None:  # its file is gone, and nothing else holds it
            return
        about = About(self.identity, entry.ids, entry.planned, [cache.state() for cache in entry.caches])
        arrays = disk_file.arrays_of(entry.caches)
        size = disk_file.most_bytes(about, arrays)
        if not room.make(size):
            return
        while self._free_bytes(self.folder) - size < self._floor_bytes:
            if not room.drop_oldest():
                raise Stopped(f"the disk has not {size} bytes above the floor of {self._floor_bytes}")
        path, size = disk_file.write(self.folder, about, arrays, check=check, put=self._put)
        entry.file = path
        room.add(path, size)
        room.drop(lambda other: prefix.covers(entry, other.about.ids, other.about.planned))

    def _entry(self, found: Found) -> Entry:
        caches = found.about.empty_caches()
        return Entry(
            found.about.ids,
            caches,
            found.nbytes,
            found.about.planned,
            thaw=partial(self._thaw, found.path, caches),
            file=found.path,
        )

    def _thaw(self, path: Path, caches: list[object]) -> bool:
        try:
            disk_file.fill(path, caches)
        except (OSError, Damaged) as error:
            _discard(path, str(error))
            return False
        return True

    def _scan(self) -> list[Found]:
        """Our files, newest first; what cannot be used is deleted, what does not look like ours is left alone."""
        found: list[Found] = []
        if not self.folder.is_dir():
            return found
        for path in self.folder.iterdir():
            if path.name.startswith(disk_file.PART) and not _is_others(path):
                _discard(path, "it was never finished")
            elif _NAME.fullmatch(path.name):
                try:
                    about, nbytes = disk_file.describe(path)
                    if about.identity != self.identity:
                        raise Damaged("it is of another state of the model, or of other settings")
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                except Damaged as error:
                    _discard(path, str(error))
                    continue
                found.append(Found(path, about, nbytes, stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda one: one.changed, reverse=True)


class _Room:
    """Who lies in the folder while a spill is under way: what is kept, and the rest, which gives way from its end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[Path, int] = {}
        self._rest: list[Found] = []

    def open(self, found: list[Found], entries: list[Entry]) -> None:
        """The entries' own files first, in their order, then those of nobody."""
        ranks = {entry.file: rank for rank, entry in enumerate(entries)}
        self._rest = sorted(found, key=lambda one: ranks.get(one.path, len(ranks)))

    @property
    def _used(self) -> int:
        return sum(self._kept.values()) + sum(one.size for one in self._rest)

    def holds(self, path: Path) -> bool:
        return path in self._kept

    def keep(self, path: Path) -> bool:
        """Keep a file that is here; False: it is not, or the cap is reached."""
        one = next((one for one in self._rest if one.path == path), None)
        if one is None or sum(self._kept.values()) + one.size > self._max_bytes:
            return False
        self._rest.remove(one)
        self._kept[path] = one.size
        return True

    def make(self, size: int) -> bool:
        """Make room for a new file under the cap, if what is kept leaves any."""
        if sum(self._kept.values()) + size > self._max_bytes:
            return False
        while self._used + size > self._max_bytes:
            self.drop_oldest()
        return True

    def add(self, path: Path, size: int) -> None:
        self._rest = [one for one in self._rest if one.path != path]
        self._kept[path] = size

    def drop_oldest(self) -> bool:
        """Delete the last of the rest; False: there is none."""
        if not self._rest:
            return False
        _unlink(self._rest.pop().path)
        return True

    def drop(self, superfluous: Callable[[Found], bool]) -> None:
        """Delete those of the rest that are superfluous."""
        for one in [one for one in self._rest if superfluous(one)]:
            self._rest.remove(one)
            _unlink(one.path)

    def trim(self) -> int:
        """Come under the cap -> bytes that are here."""
        while self._used > self._max_bytes and self.drop_oldest():
            pass
        return self._used


def _is_others(part: Path) -> bool:
    """Whether another process, which lives, is writing this."""
    owner = part.name.removeprefix(disk_file.PART)
    if not owner.isdigit() or int(owner) == os.getpid():
        return False
    try:
        os.kill(int(owner), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _discard(path: Path, reason: str) -> None:
    event(log, "spill.discarded", level=logging.WARNING, file=str(path), reason=reason)
    _unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _fsync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
