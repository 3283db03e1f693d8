"""Show every setting, what is said of single models, and where each value comes from.

  mlxd config show
  MLXD_PORT=9000 mlxd config show --json

A flag wins over a variable MLXD_*, that over mlxd.toml, that over the default.
"""

import argparse

import msgspec

from parent.commands import options
from parent.commands.terminal import print_table
from parent.config import fields
from parent.model_options import ModelOptions, Profile
from parent.values import as_written, fields_of


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
        models = msgspec.to_builtins(resolved.models)
        both["models"] = {"value": models, "origin": str(resolved.config_file) if models else "default"}
        print(msgspec.json.format(msgspec.json.encode(both)).decode())
        return 0
    rows = [
        [name, as_written(known, getattr(settings, name)) or "-", resolved.origins[name]]
        for name, known in fields().items()
    ]
    for model_id, said in resolved.models.items():
        rows += _rows_of(f"models.{model_id}", said, str(resolved.config_file))
    print_table(["SETTING", "VALUE", "FROM"], rows)
    state = "read" if resolved.config_file.exists() else "does not exist"
    print(f"\nsettings file: {resolved.config_file} ({state})")
    return 0


def _rows_of(name: str, said: ModelOptions | Profile, origin: str) -> list[list[str]]:
    """What is said of a model, its profiles included: a row for each key."""
    rows = []
    for key, known in fields_of(type(said)).items():
        value = getattr(said, key)
        if isinstance(said, ModelOptions) and key == "profiles":
            for profile, inner in said.profiles.items():
                rows += _rows_of(f"{name}.profiles.{profile}", inner, origin)
        elif value != known.default:
            rows.append([f"{name}.{key}", as_written(known, value) or "-", origin])
    return rows
