"""One `mlxd serve` per data folder: a lock that dies with its process, and the clearing of what a dead one left."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from shared.errors import ErrorCode, Refused, refuse

SUN_PATH = 104  # bytes of a socket path on macOS, its final NUL included; Linux has 108
PREFIX = "mlxd-"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EEXIST: "remove it",
    errno.ENOTDIR: "remove it",
    errno.EISDIR: "remove it",
}


class Owner(msgspec.Struct, frozen=True):
    """The content of `mlxd.lock`. `runtime` is where its sockets are."""

    pid: int
    url: str
    runtime: str = ""


class Instance:
    """The right to serve a data folder, held from `claim` to `release` (or death). A context manager."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.runtime_dir = data_dir / "run"
        self._path = data_dir / "mlxd.lock"
        self._file: IO[bytes] | None = None

    def claim(self) -> None:
        """Raises `Refused` naming the process that serves this folder already, or what forbids the lock."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._lock()
            self._clear(read_owner(self._path))
            self.runtime_dir = self._make_runtime_dir()
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
        owner = msgspec.json.encode(Owner(os.getpid(), url, str(self.runtime_dir)))
        try:
            os.ftruncate(self._file.fileno(), 0)
            self._file.write(owner)  # appends, so to the beginning
        except OSError as error:
            self.release()
            raise self._cannot_write(error) from None

    def release(self) -> None:
        """Remove the sockets' folder and the lock file."""
        if self._file is None:
            return
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

    def _clear(self, dead: Owner | None) -> None:
        """The lock is ours, so whoever wrote this is gone."""
        shutil.rmtree(self.data_dir / "run", ignore_errors=True)
        if dead is not None and _is_our_temporary(Path(dead.runtime)):
            shutil.rmtree(dead.runtime, ignore_errors=True)

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
    try:
        found = path.lstat()
    except OSError:
        return False
    ours = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    return ours and path.parent == Path("/tmp") and path.name.startswith(PREFIX)
