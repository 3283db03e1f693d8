"""Build a data set by a template.

  mlxd dataset sft_qa_pairs pairs_text=@pairs.txt
  mlxd dataset self_instruct seeds=@seeds.txt variants_per_seed=3 --model starter

What a template needs is given as FIELD=VALUE; VALUE may be @FILE, whose text it is then. Templates that ask a model ask
the server that runs.
"""

import argparse
from pathlib import Path
from typing import Any

from parent.commands import options, submitting
from shared.errors import ErrorCode, refuse
from shared.files import decode_json, read_regular
from shared.lab import Dataset

_PLAIN = (bool, int, float, list, dict)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("template", metavar="TEMPLATE", type=options.name, help="by its id")
    parser.add_argument("inputs", nargs="*", metavar="FIELD=VALUE", help="what the template needs")
    submitting.add_fields(parser, Dataset, ("template", "inputs"))


def run(args: argparse.Namespace) -> int:
    body = {"template": args.template, "inputs": dict(_input(text) for text in args.inputs)}
    return submitting.begin(args, "dataset", body | submitting.given_fields(args))


def _input(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{text!r}: write FIELD=VALUE, or FIELD=@FILE")
    if value.startswith("@"):
        path = Path(value[1:]).expanduser()
        try:
            return name, read_regular(path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise refuse(ErrorCode.INVALID_REQUEST, f"{name}: {path} cannot be read: {why}") from None
    try:
        found = decode_json(value.encode())
    except ValueError:
        return name, value
    return name, found if isinstance(found, _PLAIN) else value
