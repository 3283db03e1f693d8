"""One `mlxd serve` per data folder: a lock that dies with its process, and what a dead one left behind: workers to
adopt, in the runtime folder where their sockets are, or rubbish to clear away.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from parent.workers import adoption, runtime_file
from parent.workers.process import is_same
from parent.workers.runtime_file import RuntimeRecord
from shared.errors import ErrorCode, Refused, refuse
from shared.logs import event

log = logging.getLogger(__name__)
SUN_PATH = 104  # bytes of a socket path on macOS, its final NUL included; Linux has 108
PREFIX = "mlxd-"
END_S = 3.0  # for a worker that nobody adopts, between TERM and KILL
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EEXIST: "remove it",
    errno.ENOTDIR: "remove it",
    errno.EISDIR: "remove it",
}


class Owner(msgspec.Struct, frozen=True):
    """The content of `mlxd.lock`. `runtime` is where its sockets are; `boot` is another after every start."""

    pid: int
    url: str
    runtime: str = ""
    boot: str = ""


class Instance:
    """The right to serve a data folder, held from `claim` to `release` (or death). A context manager.

    `lock_fd`: the lock file, held already; the program that we were before an exec has handed it over.
    """

    def __init__(self, data_dir: Path, *, lock_fd: int = -1) -> None:
        self.data_dir = data_dir
        self.boot = secrets.token_hex(8)
        self._lock_fd = lock_fd
        self._leftovers: list[RuntimeRecord] = []
        self._has_jobs = False  # processes of jobs may listen there, for whoever serves next
        self.runtime_dir = data_dir / "run"
        self._path = data_dir / "mlxd.lock"
        self._file: IO[bytes] | None = None
        self._url = ""
        self._lost = ""  # why the lock is not ours any more

    def claim(self) -> None:
        """Raises `Refused` naming the process that serves this folder already, or what forbids the lock."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._lock() if self._lock_fd < 0 else self._handed_over()
            self._find_runtime_dir(read_owner(self._path))
        except OSError as error:
            self.release()
            raise self._cannot_write(error) from None
        except Refused:
            self.release()
            raise
        self.announce("")

    def announce(self, url: str) -> None:
        """Write who serves and where, for other processes to read. Raises `Refused`, and is released then."""
        assert self._file is not None
        self._url = url
        owner = msgspec.json.encode(Owner(os.getpid(), url, str(self.runtime_dir), self.boot))
        try:
            os.ftruncate(self._file.fileno(), 0)
            self._file.write(owner)  # appends, so to the beginning
        except OSError as error:
            self.release()
            raise self._cannot_write(error) from None

    def keep(self) -> str:
        """Put the lock file back where somebody has removed it under us; cheap, to be called now and then.

        Returns why that cannot be, in a line; "" = it is ours.
        """
        lost = ""
        try:
            if self._file is not None and not _is_same_file(self._file, self._path):
                old, self._file = self._file, self._lock()
                old.close()
                self.announce(self._url)
                event(log, "server.lock_is_back", level=logging.WARNING, path=str(self._path))
        except (OSError, Refused) as error:
            lost = f"its lock file {self._path} was removed: {error}"
            if not self._lost:
                event(log, "server.lock_lost", level=logging.ERROR, reason=lost)
        self._lost = lost
        return lost

    @property
    def lock_fd(self) -> int:
        """Of the lock file, to be handed over."""
        assert self._file is not None
        return self._file.fileno()

    def leftovers(self) -> list[RuntimeRecord]:
        """The workers that an earlier server wrote down and that nobody has settled yet. Adopt them, then say
        `clear_leftovers`.
        """
        return list(self._leftovers)

    async def clear_leftovers(self, kept: Collection[RuntimeRecord] = ()) -> None:
        """End the workers that were not adopted, at most a few seconds each, and remove their sockets."""
        names = {record.name for record in kept}
        for record in self._leftovers:
            if record.name not in names:
                await adoption.end(record, END_S)
        self._leftovers, self._has_jobs = [], False

    def release(self) -> None:
        """Remove the sockets' folder and the lock file; not while there are workers that another may adopt."""
        if self._file is None:
            return
        if not self._leftovers and not self._has_jobs:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._file.close()  # last: whoever waits for the lock then finds that its file is no longer this one
        self._file = None

    def _lock(self) -> IO[bytes]:
        """The lock file, held. A file that was removed between opening and locking is nobody's: try again."""
        while True:
            file = open(self._path, "a+b", buffering=0)  # noqa: SIM115  (held for the life of the server)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(file, self._path):
                    return file
            except BlockingIOError:
                file.close()
                raise self._served_already() from None
            except OSError:
                file.close()
                raise
            file.close()

    def _handed_over(self) -> IO[bytes]:
        os.set_inheritable(self._lock_fd, False)
        file = open(self._lock_fd, "a+b", buffering=0)  # noqa: SIM115  (held for the life of the server)
        if not _is_same_file(file, self._path):  # somebody removed it: ours is the lock of nothing
            file.close()
            return self._lock()
        return file

    def _served_already(self) -> Refused:
        owner = read_owner(self._path)
        who = f"process {owner.pid} at {owner.url or 'no address yet'}" if owner else "another process"
        return refuse(
            ErrorCode.FORBIDDEN,
            f"{self.data_dir} is served already by {who}; stop that one, or set MLXD_DATA_DIR to another",
        )

    def _cannot_write(self, error: OSError) -> Refused:
        place = error.filename or self.data_dir
        advice = _ADVICE.get(error.errno or 0, "see to its rights")
        return refuse(
            ErrorCode.FORBIDDEN,
            f"cannot write in the data folder {self.data_dir}: {place}: {error.strerror or error}; {advice}, or "
            "set MLXD_DATA_DIR to another folder",
        )

    def __enter__(self) -> "Instance":
        self.claim()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _find_runtime_dir(self, dead: Owner | None) -> None:
        """The lock is ours, so whoever wrote it is gone. His folder is used again if workers may live in it."""
        usual = self.data_dir.absolute() / "run"
        other = Path(dead.runtime) if dead is not None and _is_our_temporary(Path(dead.runtime)) else usual
        for folder in (other, usual):
            if not _is_ours(folder):
                continue
            found = runtime_file.read(folder / runtime_file.NAME)
            self._has_jobs = any(folder.glob(runtime_file.JOB_SOCKETS))
            if found or self._has_jobs:
                self._leftovers, self.runtime_dir = found, folder
                self._refuse_living(found)
                break
        else:
            for folder in (usual, other):
                shutil.rmtree(folder, ignore_errors=True)
            self.runtime_dir = self._make_runtime_dir()
            return
        sockets = {path for record in self._leftovers for path in (record.socket, record.adopt_socket)}
        for path in self.runtime_dir.iterdir():
            is_job = path.match(runtime_file.JOB_SOCKETS)  # the queue of jobs knows whose it is
            if str(path) not in sockets and path.name != runtime_file.NAME and not is_job:
                path.unlink()

    def _refuse_living(self, found: list[RuntimeRecord]) -> None:
        """Workers whose server lives are not left over, whoever has removed its lock file."""
        for record in found:
            if record.server != os.getpid() and is_same(record.server, record.server_start):
                raise refuse(
                    ErrorCode.FORBIDDEN,
                    f"{self.data_dir} is served already by process {record.server}, whose lock file was removed; "
                    "stop that one, or set MLXD_DATA_DIR to another",
                )

    def _make_runtime_dir(self) -> Path:
        """Private, and short enough: a socket's path has 104 bytes on macOS."""
        wanted = self.data_dir.absolute() / "run"
        if len(os.fsencode(wanted / "w999-9999999.sock")) >= SUN_PATH:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        wanted.mkdir(mode=0o700)
        return wanted


def read_owner(path: Path) -> Owner | None:
    """Who wrote the lock file; None where it says nothing readable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_our_temporary(path: Path) -> bool:
    return _is_ours(path) and path.parent == Path("/tmp") and path.name.startswith(PREFIX)


def _is_ours(path: Path) -> bool:
    """A folder of this user, no link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
