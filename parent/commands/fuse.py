"""Add adapters to the weights of a model: a new model of the library.

  mlxd fuse starter my-adapter --name my/model
  mlxd fuse starter first+second --name both --dequantize

What no adapter changes stays as it is, byte by byte; the rest is quantized again as it was. Where a server runs it does
the work.
"""

import argparse

from parent.commands import options, submitting
from parent.library.adapters import parsed
from shared.errors import ErrorCode, refuse
from shared.lab import Fuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument(
        "adapters", metavar="ADAPTER[+ADAPTER]", type=options.name, help="their names in `mlxd adapters`"
    )
    submitting.add_fields(parser, Fuse, ("model", "adapters"))


def run(args: argparse.Namespace) -> int:
    names = parsed(args.adapters)
    if not names:
        raise refuse(ErrorCode.INVALID_REQUEST, "name the adapters to add, ADAPTER or ADAPTER+ADAPTER")
    body = {"model": args.model, "adapters": names}
    return submitting.begin(args, "fuse", body | submitting.given_fields(args))
