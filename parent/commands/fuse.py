"""Add adapters to the weights of a model: a new model of the library.

  mlxd fuse starter my-adapter --name my/model
  mlxd fuse starter first+second --name both --dequantize

What no adapter changes stays as it is, byte by byte; the rest is quantized again as it was.
"""

import argparse
import re

from parent.commands import options
from parent.commands.finding import library_of, named
from parent.commands.importing import run_with_progress
from parent.library.adapters import parsed
from parent.library.roots import models_dir
from shared.errors import ErrorCode, refuse
from shared.lab import Fuse

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})?")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument(
        "adapters", metavar="ADAPTER[+ADAPTER]", type=options.name, help="their names in `mlxd adapters`"
    )
    parser.add_argument("--name", required=True, help="name of the new model, NAME or ORG/NAME")
    parser.add_argument("--dequantize", action="store_true", help="leave the weights in 16 bits")
    options.add_settings(parser, (*options.LIBRARY, "adapter_roots"))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    library = library_of(resolved.settings, resolved.models)
    entry = named(library, args.model)
    names = parsed(args.adapters)
    if not names:
        raise refuse(ErrorCode.INVALID_REQUEST, "name the adapters to add, ADAPTER or ADAPTER+ADAPTER")
    adapters = library.adapters(entry, names)
    if not _NAME.fullmatch(args.name):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"{args.name!r} cannot be a model's name; use letters, digits, '.', '-', '_' and at most one '/'",
        )
    output = models_dir(resolved.settings.data_dir) / args.name
    if output.exists():
        raise refuse(ErrorCode.CONFLICT, f"there is a model {args.name} already; choose another name")
    spec = Fuse(
        model=str(entry.path),
        model_id=entry.id,
        adapters=[str(one.path) for one in adapters],
        dequantize=args.dequantize,
    )
    done = run_with_progress(resolved.settings, spec, output)
    print(f"{args.name} is ready: {output} ({done.summary})")
    return 0
