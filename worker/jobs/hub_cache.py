"""The Hugging Face cache on disk: blobs by hash, snapshots of links into them, refs; shared with other tools.

A file is downloaded to `blobs/HASH.incomplete`, checked, and renamed. A snapshot appears when all its blobs are there
and are what their hashes say, its ref after it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # lazily

from shared.errors import ErrorCode, Refused, refuse
from shared.units import format_bytes
from worker.jobs.hub import RemoteFile, Repository

MARKER = ".mlxd-pulling"
PARTS = ".mlxd-parts"
_LOCK_WAIT_S = 2.0  # a worker whose parent was killed needs a moment to follow it


class RepoCache:
    """The folder of one repository in the cache."""

    def __init__(self, cache_dir: str, repo: str) -> None:
        self.root = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
        name = "--".join(["models", *repo.split("/")])
        self.folder = self.root / name
        self.blobs = self.folder / "blobs"
        self._locks = self.root / ".locks" / name
        self._parts = self.folder / PARTS

    def blob(self, file: RemoteFile) -> Path:
        """Where its content is, once it is verified."""
        return self.blobs / file.etag

    def part(self, file: RemoteFile) -> Path:
        """Where its content grows."""
        return self.blobs / f"{file.etag}.incomplete"

    def missing(self, file: RemoteFile) -> int:
        """Bytes that are not here yet."""
        if _size(self.blob(file)) == file.size:
            return 0
        return max(file.size - _size(self.part(file)), 0)

    def began(self, file: RemoteFile) -> None:
        """Remember that its part is ours, so that it can be cleared away when nobody wants it any more."""
        if file.etag not in _lines(self._parts):
            with self._parts.open("a", encoding="utf-8") as parts:
                parts.write(f"{file.etag}\n")

    def clear_parts(self) -> None:
        """Remove what is left of files that pulls of ours have begun and none has ended."""
        for etag in _lines(self._parts):
            (self.blobs / f"{etag}.incomplete").unlink(missing_ok=True)
        self._parts.unlink(missing_ok=True)

    @contextlib.contextmanager
    def pulling(self, commit: str) -> Iterator[None]:
        """Hold the repository: one pull of it at a time on this disk. The marker says so to who looks, and names the
        commit where it is not here yet.
        """
        self.blobs.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(parents=True, exist_ok=True)
        path = self.folder / MARKER
        give_up_at = time.monotonic() + _LOCK_WAIT_S
        while True:
            with path.open("a+b", buffering=0) as marker:
                try:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > give_up_at:
                        said = f"another process downloads to {self.folder} already; wait for it, or stop it"
                        raise refuse(ErrorCode.CONFLICT, said) from None
                    time.sleep(0.05)
                    continue
                if not _is_at(marker.fileno(), path):
                    continue  # it was removed between opening and locking
                try:
                    marker.truncate(0)
                    marker.write(b"" if self._snapshot(commit).exists() else commit.encode())
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

    @contextlib.contextmanager
    def locked(self, file: RemoteFile) -> Iterator[None]:
        """Keep other tools off a file: the lock is theirs too."""
        with WeakFileLock(self._locks / f"{file.etag}.lock"):
            yield

    def require_space(self, needed: int, floor: int) -> None:
        """Raises `Refused` (disk_full) unless `needed` bytes fit and leave `floor` free."""
        free = shutil.disk_usage(self.root).free
        if needed + floor > free:
            raise refuse(
                ErrorCode.DISK_FULL,
                f"{self.root}: {format_bytes(needed)} to download and {format_bytes(floor)} to stay free, but only "
                f"{format_bytes(free)} are free; make room, or lower disk_floor_bytes",
            )

    def publish(self, repository: Repository, revision: str) -> Path:
        """Make the snapshot of verified blobs visible, then its ref. Returns the snapshot's folder."""
        target = self._snapshot(repository.commit)
        if not target.exists():
            scratch = self.folder / ".mlxd-snapshot"
            shutil.rmtree(scratch, ignore_errors=True)
            for file in repository.files:
                self._link(file, scratch)
            target.parent.mkdir(exist_ok=True)
            scratch.rename(target)
        else:  # another tool began it: what a reader looks for first comes last
            for file in sorted(repository.files, key=lambda file: file.path == "config.json"):
                self._link(file, target)
        if revision != repository.commit:
            ref = self.folder / "refs" / (revision or "main")
            ref.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.folder / ".mlxd-ref"
            scratch.write_text(repository.commit, encoding="utf-8")
            scratch.replace(ref)
        return target

    def _snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def _link(self, file: RemoteFile, snapshot: Path) -> None:
        """Links are relative to where the snapshot will be, so that the cache can be moved."""
        pointer = snapshot / file.path
        pointer.parent.mkdir(parents=True, exist_ok=True)
        blob = self.blob(file)
        up = "../" * (len(Path(file.path).parts) + 1)
        scratch = self.folder / ".mlxd-link"
        scratch.unlink(missing_ok=True)
        try:
            scratch.symlink_to(f"{up}blobs/{file.etag}")
        except OSError:  # a file system without symbolic links
            try:
                scratch.hardlink_to(blob)
            except OSError:
                shutil.copyfile(blob, scratch)
        scratch.replace(pointer)


def disk_refusal(error: OSError, cache: RepoCache) -> Refused:
    """What the disk said, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return refuse(ErrorCode.DISK_FULL, f"the disk of {cache.root} is full; make room, and pull again")
    place = error.filename or cache.root
    return refuse(ErrorCode.FORBIDDEN, f"cannot write {place}: {error.strerror or error}; see to its rights")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
