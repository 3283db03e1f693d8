"""What a job gets to work with: a way to tell, a way to be stopped, and a folder that appears whole or not.

A job writes into a scratch folder beside its output and calls `publish`: the files are on disk before the
folder gets its name, so that a crash at any instruction leaves the old output or the new one.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ErrorCode, refuse
from shared.jobs import JobEvent
from shared.units import format_bytes


@dataclass(frozen=True)
class JobContext:
    """`emit` an event; `should_stop()` says that the job is no longer wanted; `output` is what it shall make. `work`:
    a folder for checkpoints. `resume`: what the last `JobSaved` of this job said, "" = begin.
    """

    emit: Callable[[JobEvent], None]
    should_stop: Callable[[], bool]
    output: Path | None = None
    work: Path | None = None
    resume: str = ""

    def check(self) -> None:
        """Raises `Refused` (shutting_down) once the job has been asked to stop. Call it at safe points."""
        if self.should_stop():
            raise refuse(ErrorCode.SHUTTING_DOWN, "the job was stopped; nothing was written")


def require_space(folder: Path, needed: int) -> None:
    """Raises `Refused` (cannot_fit) when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise refuse(
            ErrorCode.CANNOT_FIT,
            f"{folder}: {format_bytes(needed)} are needed and {format_bytes(free)} are free; make room first",
        )


def make_scratch(output: Path) -> Path:
    """A fresh folder beside `output`, on the same disk; scratch folders of dead processes go away."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.part-"
    for left in output.parent.glob(f"{prefix}*"):
        owner = left.name.removeprefix(prefix)
        if not owner.isdigit() or int(owner) == os.getpid() or not _is_alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = output.with_name(f"{prefix}{os.getpid()}")
    scratch.mkdir()
    return scratch


def publish(scratch: Path, output: Path) -> None:
    """Give the finished scratch folder the name `output`; an older folder of that name is replaced."""
    for file in scratch.rglob("*"):
        if file.is_file():
            _fsync(file)
    _fsync(scratch)
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    replaced = output.exists()
    if replaced:
        output.rename(old)
    try:
        scratch.rename(output)
    except OSError:
        if replaced:
            old.rename(output)
        raise
    _fsync(output.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # some file systems refuse it for folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
