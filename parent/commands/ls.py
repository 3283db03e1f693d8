"""List the models of the library.

  mlxd ls
  mlxd ls --json

Root: own = the models folder of mlxd, extra = a folder of model_dirs, hf = the Hugging Face cache. The type says
what the files hold; the notes say what that means on this machine. A model that cannot be loaded is listed with
the reason. The JSON also says whether each one fits on this machine: fully, partly (it loads, for fewer tokens at a
time than `mlxd fit` counts with) or not at all.
"""

import argparse
import sys
from typing import Any

import msgspec

from parent.commands import options
from parent.commands.finding import library_of
from parent.commands.terminal import print_table
from parent.config import Resolved
from parent.library.catalog import ModelEntry, shown
from parent.library.library import Library
from parent.library.machine import Device, find_device
from parent.library.roots import models_dir
from parent.pool.estimate import recipe_of, room_of
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_settings(parser, options.LIBRARY)


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    library = library_of(resolved.settings, resolved.models)
    entries = library.entries
    if args.json:
        device = find_device(resolved.settings.memory_budget_bytes)
        listed = [
            {**shown(entry), "aliases": library.names(entry)[1:], **_room(entry, library, resolved, device)}
            for entry in entries
        ]
        print(msgspec.json.format(msgspec.json.encode(listed)).decode())
    elif not entries:
        folder = models_dir(resolved.settings.data_dir)
        print(f"no models in {folder} yet; `mlxd pull starter` fetches a small one")
    else:
        header = ["MODEL", "ALIASES", "ROOT", "FAMILY", "SIZE", "TYPE", "CONTEXT", "SUPPORT"]
        print_table(header, [_row(entry, library) for entry in entries])
        for entry in entries:
            if remark := entry.error or entry.note:
                print(f"{entry.id}: {_verdict(entry)}{remark}")
    return 0


def _room(entry: ModelEntry, library: Library, resolved: Resolved, device: Device) -> dict[str, Any]:
    """Whether it fits here, as the settings would load it."""
    recipe = recipe_of(entry, library.options(entry.id), resolved.settings, [sys.executable], "")
    found: dict[str, Any] = msgspec.to_builtins(room_of(entry, recipe.launch, device))
    return found


def _verdict(entry: ModelEntry) -> str:
    return "broken: " if entry.error and not entry.unsupported else ""


def _row(entry: ModelEntry, library: Library) -> list[str]:
    kind = f"{entry.quantization} {entry.dtype}".strip()
    return [
        entry.id,
        ", ".join(library.names(entry)[1:]) or "-",
        entry.root,
        entry.family or "-",
        format_bytes(entry.bytes) if entry.bytes else "-",
        kind or "-",
        str(entry.context or "-"),
        entry.support if entry.unsupported or not entry.error else "broken",
    ]
