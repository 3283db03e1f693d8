"""Reading files that others have put there: only regular ones, so that no read ever waits for somebody to write; and
the JSON in them, whatever it is.

Opening a named pipe waits for its other end, and reading a device or a socket may have effects or never end.
"""

import errno
import os
import stat
from typing import Any, BinaryIO

import msgspec


class NotRegular(OSError):
    """`strerror` says what is there in the place of a file."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open for reading. Raises OSError: `NotRegular` for what is no file, and for a link that leads nowhere."""
    try:
        _require(os.stat(path).st_mode, path)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.islink(path):
            raise NotRegular(errno.ENOENT, "a link that leads nowhere", os.fspath(path)) from None
        raise
    try:
        _require(os.fstat(handle).st_mode, path)  # it may be another one by now
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The whole content. Raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def decode_json(data: bytes, kind: Any = Any) -> Any:
    """JSON that somebody else wrote, as `kind`. Raises ValueError in one line, also where it is nested without end."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("objects and lists stand too deep in each other") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _require(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegular(errno.EINVAL, f"{kind}, not a file", os.fspath(path))
