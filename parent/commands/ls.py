"""List the models of the library.

  mlxd ls
  mlxd ls --json

The type column says what the files hold; the notes say what that means on this machine. A model that cannot
be loaded is listed with the reason.
"""

import argparse

import msgspec

from parent.commands import options
from parent.commands.terminal import print_table
from parent.library.catalog import ModelEntry, models_dir, scan
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    entries = scan(settings.data_dir)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(entries, enc_hook=str)).decode())
    elif not entries:
        print(f"no models in {models_dir(settings.data_dir)} yet; `mlxd pull starter` fetches a small one")
    else:
        print_table(
            ["MODEL", "ALIASES", "FAMILY", "SIZE", "TYPE", "CONTEXT"], [_row(entry) for entry in entries]
        )
        for entry in entries:
            if remark := entry.error or entry.note:
                print(f"{entry.id}: {_verdict(entry)}{remark}")
    return 0


def _verdict(entry: ModelEntry) -> str:
    return "broken: " if entry.error and not entry.unsupported else ""


def _row(entry: ModelEntry) -> list[str]:
    aliases = ", ".join(entry.aliases) or "-"
    if entry.error:
        return [entry.id, aliases, "-", "-", "unsupported" if entry.unsupported else "broken", "-"]
    kind = f"{entry.quantization} {entry.dtype}".strip()
    return [entry.id, aliases, entry.family, format_bytes(entry.bytes), kind, str(entry.context or "-")]
