"""The process of a job, as its row names it for a later parent, and the files that belong to a job."""

import shutil
from pathlib import Path

import msgspec

from parent.workers.runtime_file import Pid
from shared.control import Fatal, FromWorker, JobUpdate
from shared.files import decode_json


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`pid` and `start_time` together name the process: numbers alone are given out again. `adopt_socket`: where it
    listens to a later parent, who says `nonce`; "" = it does not.
    """

    pid: Pid
    start_time: float
    adopt_socket: str = ""
    nonce: str = ""
    wire: int = 0
    socket: str = ""  # of a data channel, which a job has not


def encoded(record: JobRecord) -> str:
    """As it stands in the row."""
    return msgspec.json.encode(record).decode()


def decoded(text: str) -> JobRecord | None:
    """None where the row names no process, or one of another version of mlxd."""
    try:
        found: JobRecord = decode_json(text.encode(), JobRecord)
        return found
    except ValueError:
        return None


class Folder:
    """`<data folder>/jobs/<id>`: checkpoints, scratch files, and what its process told while nobody listened."""

    def __init__(self, root: Path, job_id: str) -> None:
        self.path = root / job_id
        self.scratch = self.path / "tmp"

    def spool(self, attempt: int) -> Path:
        """What the process of this attempt told."""
        return self.path / f"told-{attempt}.ndjson"

    def make(self, attempt: int) -> None:
        """For a new attempt. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._forget_old()
        self.scratch.mkdir(exist_ok=True)
        self.spool(attempt).touch(mode=0o600)

    def tidy(self, *, keep: bool) -> None:
        """Its process has gone. `keep`: what a later attempt goes on from."""
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.path.is_dir():
            self._forget_old()

    def _forget_old(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        for old in self.path.glob("told-*.ndjson"):
            old.unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes of all that is in it."""
        total = 0
        for path in self.path.rglob("*"):
            try:
                total += path.lstat().st_size
            except OSError:  # it went just now
                continue
        return total


_decode = msgspec.json.Decoder(FromWorker).decode


def told(spool: Path, heard: int) -> list[JobUpdate | Fatal]:
    """What a process that is dead told and nobody heard, in order. Lines that a full disk has torn are left out."""
    try:
        lines = spool.read_bytes().splitlines()
    except OSError:
        return []
    found: list[JobUpdate | Fatal] = []
    for line in lines:
        try:
            message = _decode(line)
        except msgspec.MsgspecError:
            continue
        if isinstance(message, Fatal):
            found.append(message)
        elif isinstance(message, JobUpdate) and message.seq > heard:
            heard = message.seq
            found.append(message)
    return found
