"""Delete a model of the library. Never one that a running server serves.

mlxd rm SmolLM2-135M-Instruct
mlxd rm starter --yes
"""

import argparse
from pathlib import Path

from parent.commands import options
from parent.commands.deleting import delete
from parent.commands.finding import library_of, named
from parent.commands.running import require_not_served
from parent.commands.terminal import confirm
from parent.library.catalog import ModelEntry
from parent.library.roots import models_dir
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options.add_settings(parser, options.LIBRARY)


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    settings = resolved.settings
    entry = named(library_of(settings, resolved.models), args.model)
    root = models_dir(settings.data_dir)
    if entry.root != "own":
        raise refuse(ErrorCode.FORBIDDEN, _not_ours(entry, root))
    require_not_served(settings.data_dir, entry.path, entry.id)
    confirm(f"Delete {entry.id} ({format_bytes(entry.bytes)})?", yes=args.yes)
    delete(entry.path, root)
    print(f"{entry.id} is deleted")
    return 0


def _not_ours(entry: ModelEntry, root: Path) -> str:
    if entry.root == "hf":
        cache, folder = entry.path.parents[2], entry.path.parents[1].name
        repository = folder.removeprefix("models--").replace("--", "/")
        return (
            f"{entry.id} is in the Hugging Face cache {cache}, which other programs use too; delete it with "
            f"`hf cache rm model/{repository}`"
        )
    return f"{entry.path} is not in the library {root}; delete it yourself"
