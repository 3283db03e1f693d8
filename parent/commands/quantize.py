"""Quantize a model to a new model of the library.

  mlxd quantize org/name
  mlxd quantize org/name --bits 8 --group-size 32
  mlxd quantize org/name --target-bpw 4.5

With --target-bpw each module gets one of the candidate bits by how much it matters, so that on average a weight has
so many bits. Where a server runs it does the work.
"""

import argparse

from parent.commands import options, submitting
from shared.lab import Quantize


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    submitting.add_fields(parser, Quantize, ("model",))


def run(args: argparse.Namespace) -> int:
    return submitting.begin(args, "quantize", {"model": args.model} | submitting.given_fields(args))
