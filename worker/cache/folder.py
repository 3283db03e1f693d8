"""The folders of all models on disk: how much lies there, who goes first, what is put aside."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shared.logs import event
from worker.cache import block_file

log = logging.getLogger("cache")

ASIDE = "damaged"
"""The folder inside a model's where damaged blocks go, for whoever wants to know why; the newest few are kept."""

KEPT_ASIDE = 4

RESCAN = 64
"""Files that are written between two looks at the folders of others."""


class Room:
    """At most `max_bytes` in the folders below `root`. Files of other models may come and go without our doing.

    One thread at a time changes it, except `bytes_in`.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._sizes: dict[Path, tuple[int, int]] = {}  # path -> (time of use in ns, bytes)
        self._total = 0
        self._in: Counter[Path] = Counter()  # bytes by folder
        self._unscanned = (
            RESCAN  # others' folders are looked at before the first write, not while a model loads
        )

    def open(self, folder: Path, identity: str) -> list[Path]:
        """Our files in `folder`; those of another state of the model, and what was never finished, are deleted.

        Raises OSError.
        """
        ours: list[Path] = []
        if folder.is_dir():
            for path in folder.iterdir():
                name = block_file.parse(path.name)
                if path.name.startswith(block_file.PART):
                    if not _is_others(path):
                        _discard(path, "it was never finished")
                elif path.name.endswith(".safetensors") and (name is None or name.identity != identity):
                    _discard(path, "it is of another state of the model, or of other settings")
                elif name is not None:
                    ours.append(path)
                    self._see(path)
        return ours

    def bytes_in(self, folder: Path) -> int:
        return self._in[folder]

    def make(self, size: int, forget: Callable[[Path], None]) -> None:
        """Make room for a file under the cap. Raises OSError where the cap is smaller than the file."""
        if size > self._max_bytes:
            raise OSError(f"a block has {size} bytes, and all that may be kept is {self._max_bytes}")
        if self._unscanned >= RESCAN:
            self._scan()
        if self._total + size > self._max_bytes:  # rather many at once than a search for the oldest each time
            for path in sorted(self._sizes, key=self._sizes.__getitem__):
                if self._total + size <= self._max_bytes - self._max_bytes // 20:
                    break
                self._drop(path, forget)

    def add(self, path: Path, size: int, used: int) -> None:
        """A file is here now."""
        self._unscanned += 1
        if path in self._sizes:  # put aside, and written again
            self._take_out(path)
        self._sizes[path] = (used, size)
        self._total += size
        self._in[path.parent] += size
        self.touch(path, used)

    def touch(self, path: Path, used: int) -> None:
        """A file was used."""
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used, used))
        if path in self._sizes:
            self._sizes[path] = (used, self._sizes[path][1])

    def drop_oldest(self, forget: Callable[[Path], None]) -> bool:
        """Delete the file that was not used for longest; False: there is none."""
        if not self._sizes:
            return False
        self._drop(min(self._sizes, key=self._sizes.__getitem__), forget)
        return True

    def _drop(self, path: Path, forget: Callable[[Path], None]) -> None:
        self._take_out(path)
        forget(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _take_out(self, path: Path) -> None:
        size = self._sizes.pop(path)[1]
        self._total -= size
        self._in[path.parent] -= size

    def _scan(self) -> None:
        """Look at what lies in all folders."""
        self._unscanned, self._total = 0, 0
        self._sizes, self._in = {}, Counter()
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            for path in folder.glob("*.safetensors"):
                self._see(path)

    def _see(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            stat = path.stat()
            self._sizes[path] = (stat.st_mtime_ns, stat.st_size)
            self._total += stat.st_size
            self._in[path.parent] += stat.st_size


def put_aside(path: Path, reason: str) -> None:
    """A damaged block: it will not be found again, and can be looked at."""
    event(log, "store.damaged", level=logging.WARNING, file=str(path), reason=reason)
    aside = path.parent / ASIDE
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        path.rename(aside / path.name)
        for old in sorted(aside.iterdir(), key=lambda each: each.stat().st_mtime)[:-KEPT_ASIDE]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _is_others(part: Path) -> bool:
    """Whether another process, which lives, is writing this."""
    owner = part.name.removeprefix(block_file.PART)
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
    event(log, "store.discarded", level=logging.INFO, file=str(path), reason=reason)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
