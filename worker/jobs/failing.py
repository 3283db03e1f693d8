"""What an exception that no job has foreseen means: out of memory, a full disk, or a bug."""

import errno
import re

from shared.errors import ErrorCode, Failure

_NO_ROOM = re.compile(r"\balloc|out of memory|bad_alloc", re.IGNORECASE)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def failure_of(error: Exception) -> Failure:
    """The failure as the parent gets it, in one line."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    match error:
        case MemoryError():
            return Failure(ErrorCode.CANNOT_FIT, f"out of memory ({said})")
        case RuntimeError() if _NO_ROOM.search(said):  # mlx says so
            return Failure(ErrorCode.CANNOT_FIT, f"out of memory ({said})")
        case OSError(errno=number) if number in _FULL:
            return Failure(ErrorCode.DISK_FULL, f"the disk is full ({said}); free some room, then again")
    return Failure(ErrorCode.INTERNAL, f"the job failed: {type(error).__name__}: {error}")
