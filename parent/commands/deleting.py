"""Delete a folder of ours: out of sight in one step, so that a scan never sees half of it, then piece by piece."""

import os
import shutil
from pathlib import Path

from shared.errors import ErrorCode, refuse


def delete(folder: Path, root: Path) -> None:
    """Delete `folder`, of a link the link alone, and the folder around it where that is left empty below `root`.

    Raises `Refused` (forbidden).
    """
    doomed = folder.with_name(f".removing-{folder.name}-{os.getpid()}")
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            folder.rename(doomed)
            shutil.rmtree(doomed)
        if folder.parent != root and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    except OSError as error:
        raise refuse(ErrorCode.FORBIDDEN, f"cannot delete {error.filename}: {error.strerror}") from None
