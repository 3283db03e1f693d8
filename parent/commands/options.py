"""Flags that stand for settings, and the settings of one command."""

import argparse
import os
import sys
from pathlib import Path

from parent.config import Resolved, Settings, fields, load_settings
from parent.live_config import LiveConfig
from parent.values import as_written

_PLACE = ("data_dir",)
LIBRARY = ("data_dir", "model_dirs", "hf_cache")  # where models are looked for


def add_settings(parser: argparse.ArgumentParser, names: tuple[str, ...] = _PLACE) -> None:
    """One flag per setting named, and `--config`."""
    group = parser.add_argument_group("settings (also as MLXD_* variables or in mlxd.toml)")
    for setting in names:
        known = fields()[setting]
        kind = {"bytes": "SIZE", "seconds": "TIME"}.get(known.unit, setting.upper())
        default = "~/.mlxd" if setting == "data_dir" else as_written(known, known.default)
        shown = f" (default {default})" if default else ""
        group.add_argument(
            *known.flags,
            dest=f"setting_{setting}",
            metavar="|".join(known.choices) or kind,
            help=f"{known.description}{shown}".replace("%", "%%"),
        )
    group.add_argument(
        "--config", metavar="FILE", type=name, help="settings file (default mlxd.toml in the data folder)"
    )


def name(text: str) -> str:
    """The type of every argument that names a model or a file: an empty one (of a script's unset variable) would
    otherwise mean the current folder, or whatever is the default.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no name; write one, or leave the argument out")
    return text


def flags_of(args: argparse.Namespace, **more: str) -> dict[str, str]:
    """The settings given as flags, by name; `more` counts as flags."""
    flags = {
        key.removeprefix("setting_"): value
        for key, value in vars(args).items()
        if key.startswith("setting_") and value is not None
    }
    if args.config:
        flags["config"] = args.config
    return {**flags, **more}


def resolve(args: argparse.Namespace, **more: str) -> Resolved:
    """The settings as flags, variables and file make them. Notes go to stderr."""
    resolved = load_settings(flags_of(args, **more), os.environ, home=Path.home())
    _tell(resolved.notes)
    return resolved


def live_of(args: argparse.Namespace, **more: str) -> LiveConfig:
    """The same, for a server: settings that may change while it runs."""
    live = LiveConfig(flags_of(args, **more), os.environ, home=Path.home())
    _tell(live.notes)
    return live


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(f"mlxd: note: {note}", file=sys.stderr)


def settings_of(args: argparse.Namespace, **more: str) -> Settings:
    """`resolve` for those who need only the values."""
    return resolve(args, **more).settings
