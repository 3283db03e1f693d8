"""Delete a model of the library. Never one that a running server serves.

mlxd rm SmolLM2-135M-Instruct
mlxd rm starter --yes
"""

import argparse
import os
import shutil

from parent.commands import options
from parent.commands.running import require_not_served
from parent.commands.terminal import confirm
from parent.library.catalog import models_dir, resolve, scan
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    entry = resolve(args.model, scan(settings.data_dir))
    root = models_dir(settings.data_dir)
    if not entry.path.is_relative_to(root):
        raise refuse(ErrorCode.FORBIDDEN, f"{entry.path} is not in the library {root}; delete it yourself")
    require_not_served(settings.data_dir, entry.path, entry.id)
    confirm(f"Delete {entry.id} ({format_bytes(entry.bytes)})?", yes=args.yes)
    # Out of sight in one step, so that a scan never sees half a model; then piece by piece.
    doomed = entry.path.with_name(f".removing-{entry.path.name}-{os.getpid()}")
    try:
        if entry.path.is_symlink():
            entry.path.unlink()
        else:
            entry.path.rename(doomed)
            shutil.rmtree(doomed)
        if entry.path.parent != root and not any(entry.path.parent.iterdir()):
            entry.path.parent.rmdir()
    except OSError as error:
        raise refuse(ErrorCode.FORBIDDEN, f"cannot delete {error.filename}: {error.strerror}") from None
    print(f"{entry.id} is deleted")
    return 0
