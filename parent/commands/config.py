"""Show every setting, its value and where that value comes from.

  mlxd config show
  MLXD_PORT=9000 mlxd config show --json

A flag wins over a variable MLXD_*, that over mlxd.toml, that over the default.
"""

import argparse

import msgspec

from parent.commands import options
from parent.commands.terminal import print_table
from parent.config import fields
from parent.values import as_written


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["show"], help="show: print the settings")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_settings(parser, tuple(fields()))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    settings = resolved.settings
    if args.json:
        values = msgspec.to_builtins(settings, enc_hook=str)
        both = {name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()}
        print(msgspec.json.format(msgspec.json.encode(both)).decode())
        return 0
    rows = [
        [name, as_written(known, getattr(settings, name)) or "-", resolved.origins[name]]
        for name, known in fields().items()
    ]
    print_table(["SETTING", "VALUE", "FROM"], rows)
    state = "read" if resolved.config_file.exists() else "does not exist"
    print(f"\nsettings file: {resolved.config_file} ({state})")
    return 0
