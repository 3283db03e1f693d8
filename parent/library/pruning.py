"""Snapshots of the Hugging Face cache that newer ones have taken the place of: which, how many bytes, their removal.

A snapshot is superseded when no ref points to it, and `main` points to another one that is complete. One that is in
use, whatever for, stays; a repository to which somebody downloads is left alone as a whole. Bytes are those that a
removal gives back: blobs and files that nothing else holds.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from parent.library.hf_cache import PULLING, complete_in, is_pending, refs_of

Used = Callable[[str, str, Path], str]
"""(repository, commit, folder of a snapshot) to why it must stay; "" = nothing speaks for it."""
_DOOMED = ".mlxd-pruned-"


class Skipped(msgspec.Struct, frozen=True):
    """A superseded snapshot that stays, and why."""

    commit: str
    reason: str


class RepoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One repository. `prune_snapshots`: commits; `dead_blobs`: names of files that no snapshot would need any more."""

    repo_id: str
    prune_snapshots: list[str]
    skipped_snapshots: list[Skipped]
    dead_blobs: list[str]
    reclaim_bytes: int


class Pruned(msgspec.Struct, frozen=True):
    """What was removed."""

    snapshots: int = 0
    blobs: int = 0
    reclaimed_bytes: int = 0


def plan(cache: Path, used: Used) -> list[RepoPlan]:
    """Every repository with a superseded snapshot, by name."""
    found = [_plan_of(folder, used) for folder in _repos(cache)]
    return [one for one in found if one is not None]


def _repos(cache: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(cache))
    except OSError:
        return
    for name in names:
        parts = name.split("--")
        if parts[0] == "models" and len(parts) > 1 and all(parts) and name.isprintable():
            yield cache / name


def _plan_of(folder: Path, used: Used, *, is_held: bool = False) -> RepoPlan | None:
    """`is_held`: we keep pulls away."""
    repo = "/".join(folder.name.split("--")[1:])
    refs = refs_of(folder)
    if refs.get("main") not in complete_in(folder, is_held=is_held):
        return None
    pointed = set(refs.values())
    doomed = _left_over(folder)
    superseded = [each for each in _snapshots(folder) if each.name not in pointed]
    if not superseded and not doomed:
        return None
    busy = ""
    if is_pending(folder) or (not is_held and _is_pulled(folder)):
        busy, doomed = "somebody downloads to this repository, or has stopped half-way", []
    skipped = []
    for snapshot in superseded:
        reason = busy or used(repo, snapshot.name, snapshot)
        if reason:
            skipped.append(Skipped(snapshot.name, reason))
        else:
            doomed.append(snapshot)
    dead, size = _gain(folder, doomed)
    return RepoPlan(
        repo_id=repo,
        prune_snapshots=[each.name.removeprefix(_DOOMED) for each in doomed],
        skipped_snapshots=skipped,
        dead_blobs=[blob.name for blob in dead],
        reclaim_bytes=size,
    )


def _snapshots(folder: Path) -> list[Path]:
    place = folder / "snapshots"
    try:
        return sorted(place / name for name in os.listdir(place) if not name.startswith("."))
    except OSError:
        return []


def _left_over(folder: Path) -> list[Path]:
    """Put aside by a removal that did not come to its end."""
    return sorted((folder / "snapshots").glob(f"{_DOOMED}*"))


def _gain(folder: Path, doomed: list[Path]) -> tuple[list[Path], int]:
    """The blobs that nothing would hold any more, and all bytes that come back, of files that are no links too."""
    if not doomed:
        return [], 0
    staying = {
        os.path.realpath(file)
        for each in _snapshots(folder)
        if each not in doomed
        for file in _files(each)
        if file.is_symlink()
    }
    blobs = os.path.realpath(folder / "blobs")
    dead: dict[str, int] = {}
    whole = 0
    seen: set[tuple[int, int]] = set()
    for snapshot in doomed:
        for file in _files(snapshot):
            try:
                status = file.lstat()
                if not file.is_symlink():
                    links = sum(1 for _ in _same(folder, doomed, status)) if status.st_nlink > 1 else 1
                    if (status.st_dev, status.st_ino) not in seen and links >= status.st_nlink:
                        whole += status.st_size
                    seen.add((status.st_dev, status.st_ino))
                    continue
                target = os.path.realpath(file)
                if target not in staying and os.path.dirname(target) == blobs:
                    dead[target] = os.stat(target).st_size
            except OSError:
                continue  # a link that leads nowhere holds nothing
    return [Path(name) for name in sorted(dead)], whole + sum(dead.values())


def _same(folder: Path, doomed: list[Path], status: os.stat_result) -> Iterator[Path]:
    """Hard links to one file that would all go."""
    for snapshot in doomed:
        for file in _files(snapshot):
            with contextlib.suppress(OSError):
                other = file.lstat()
                if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                    yield file


def _files(snapshot: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(snapshot):
        folders.sort()
        for name in sorted(files):
            yield Path(place, name)


def _is_pulled(folder: Path) -> bool:
    """Whether a pull of ours is at it; the marker of a dead one says nothing."""
    try:
        with (folder / PULLING).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Keep pulls of ours away; False where one is at it."""
    marker = folder / PULLING
    try:
        with marker.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                marker.unlink(missing_ok=True)
    except OSError:
        yield False


def execute(cache: Path, used: Used, aside: Callable[[str, str, Path, Path], bool]) -> Pruned:
    """Plan anew and remove. `aside(repository, commit, folder, doomed)` renames a snapshot so that nobody finds it any
    more, unless it is used after all; it is asked last, and alone decides.
    """
    snapshots = blobs = size = 0
    for folder in _repos(cache):
        with _held(folder) as free:
            if not free:
                continue
            found = _plan_of(folder, used, is_held=True)
            if found is None or not found.prune_snapshots:
                continue
            gone = _left_over(folder)
            for commit in found.prune_snapshots:
                doomed = folder / "snapshots" / f"{_DOOMED}{commit}"
                if doomed not in gone and aside(found.repo_id, commit, folder / "snapshots" / commit, doomed):
                    gone.append(doomed)
            dead, gain = _gain(folder, gone)
            for snapshot in gone:
                shutil.rmtree(snapshot, ignore_errors=True)
            for blob in dead:
                try:
                    blob.unlink()
                except OSError:
                    with contextlib.suppress(OSError):
                        gain -= blob.stat().st_size
                    continue
                blobs += 1
            snapshots += len(gone)
            size += gain
    return Pruned(snapshots, blobs, size)
