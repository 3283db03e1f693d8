"""List adapters, or delete one.

  mlxd adapters
  mlxd adapters rm my-adapter

Adapters lie in the folder `adapters` of the data folder, and in those of adapter_roots. A request asks for one as
MODEL:ADAPTER, or for several as MODEL:A+B.
"""

import argparse
from pathlib import Path

import msgspec

from parent.commands import options
from parent.commands.deleting import delete
from parent.commands.finding import library_of
from parent.commands.running import call, find_running
from parent.commands.terminal import confirm, print_table
from parent.library.adapters import Shelved, adapters_dir
from parent.library.library import Library
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes

VERBS = ("ls", "rm")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=VERBS, default="ls", help="ls (the default) or rm")
    parser.add_argument("adapter", nargs="?", metavar="ADAPTER", help="the one to delete")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options.add_settings(parser, (*options.LIBRARY, "adapter_roots"))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    library = library_of(resolved.settings, resolved.models)
    if args.what == "rm":
        return _remove(library, resolved.settings.data_dir, args.adapter or "", yes=args.yes)
    if args.adapter:
        raise refuse(ErrorCode.INVALID_REQUEST, f"`mlxd adapters ls` takes no name, not {args.adapter!r}")
    shelf = library.shelf
    models = {one.id: _models(library, one) for one in shelf.entries}
    if args.json:
        rows = [{**_facts(one), "models": models[one.id]} for one in shelf.entries]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif not shelf.entries:
        print(f"no adapters in {adapters_dir(resolved.settings.data_dir)} yet")
    else:
        header = ["ADAPTER", "KIND", "RANK", "SCALE", "SIZE", "MODELS"]
        print_table(header, [_row(one, models[one.id]) for one in shelf.entries])
        for one in shelf.entries:
            if one.error:
                print(f"{one.id}: broken: {one.error}")
    return 0


def _models(library: Library, one: Shelved) -> list[str]:
    return [
        entry.id
        for entry in library.entries
        if not entry.error and not library.shelf.misfit(one, entry, library.model_of)
    ]


def _facts(one: Shelved) -> dict[str, object]:
    facts: dict[str, object] = {"id": one.id, "path": str(one.path), "error": one.error}
    if one.adapter is not None:
        facts |= {
            "kind": one.adapter.kind,
            "rank": one.adapter.rank,
            "scale": one.adapter.scale,
            "base_models": one.adapter.base_models,
            "size_bytes": one.adapter.num_bytes,
        }
    return facts


def _row(one: Shelved, models: list[str]) -> list[str]:
    if one.adapter is None:
        return [one.id, "broken", "-", "-", "-", "-"]
    adapter = one.adapter
    size = format_bytes(adapter.num_bytes)
    return [one.id, adapter.kind, str(adapter.rank), f"{adapter.scale:g}", size, ", ".join(models) or "-"]


def _remove(library: Library, data_dir: Path, name: str, *, yes: bool) -> int:
    one = next((each for each in library.shelf.entries if each.id == name), None)
    if one is None:
        ids = ", ".join(each.id for each in library.shelf.entries) or "none"
        raise refuse(ErrorCode.MODEL_NOT_FOUND, f"there is no adapter {name!r}; there is {ids}")
    root = adapters_dir(data_dir)
    if root not in one.path.parents:
        raise refuse(ErrorCode.FORBIDDEN, f"{one.path} is not in {root}; delete it yourself")
    running = find_running(data_dir)
    rows = call(running, "GET", "/v1/adapters").get("adapters", []) if running is not None else []
    for row in rows:
        if row.get("id") == name and row.get("in_use"):
            raise refuse(ErrorCode.FORBIDDEN, f"{name} is in use by {row.get('model')}; wait until it is not")
    size = format_bytes(one.adapter.num_bytes) if one.adapter else "broken"
    confirm(f"Delete adapter {name} ({size})?", yes=yes)
    delete(one.path, root)
    print(f"{name} is deleted")
    return 0
