"""Flags that stand for settings, and the settings of one command."""

import argparse
import os
import sys
from pathlib import Path

from parent.config import Resolved, Settings, fields, load_settings

_PLACE = ("data_dir",)


def add_settings(parser: argparse.ArgumentParser, names: tuple[str, ...] = _PLACE) -> None:
    """One flag per setting named, and `--config`."""
    group = parser.add_argument_group("settings (also as MLXD_* variables or in mlxd.toml)")
    for name in names:
        known = fields()[name]
        kind = {"bytes": "SIZE", "seconds": "TIME"}.get(known.unit, name.upper())
        default = "~/.mlxd" if name == "data_dir" else known.default
        shown = f" (default {default})" if default not in ("", []) else ""
        group.add_argument(
            known.flag,
            dest=f"setting_{name}",
            metavar="|".join(known.choices) or kind,
            help=f"{known.description}{shown}".replace("%", "%%"),
        )
    group.add_argument(
        "--config", metavar="FILE", help="settings file (default mlxd.toml in the data folder)"
    )


def resolve(args: argparse.Namespace, **more: str) -> Resolved:
    """The settings as flags, variables and file make them; `more` counts as flags. Notes go to stderr."""
    flags = {
        name.removeprefix("setting_"): value
        for name, value in vars(args).items()
        if name.startswith("setting_") and value is not None
    }
    if args.config:
        flags["config"] = args.config
    resolved = load_settings({**flags, **more}, os.environ, home=Path.home())
    for note in resolved.notes:
        print(f"mlxd: note: {note}", file=sys.stderr)
    return resolved


def settings_of(args: argparse.Namespace, **more: str) -> Settings:
    """`resolve` for those who need only the values."""
    return resolve(args, **more).settings
