"""Keys for who may ask the server. While there is none everybody may who reaches it; with the first all need one.

  mlxd keys add laptop                     makes a key, and shows it this once
  mlxd keys add laptop --key - < my-key    takes one of yours
  mlxd keys
  mlxd keys rm laptop

Commands on this machine, which know the data folder, need none; the page asks for one. Clients send it as
`Authorization: Bearer` or `x-api-key`, as their SDKs do with `api_key`. A running server knows at once.
"""

import argparse
import sys
import time

import msgspec

from parent import keys
from parent.commands import options
from parent.commands.terminal import confirm, print_table
from shared.errors import ErrorCode, refuse

VERBS = ("ls", "add", "rm")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=VERBS, default="ls", help="ls (the default), add or rm")
    parser.add_argument("name", nargs="?", metavar="NAME", default="", help="whose key it is, in a word")
    parser.add_argument("--key", choices=["-"], help="- reads a key of your own from standard input")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    data_dir = options.settings_of(args).data_dir
    if args.what == "ls" and args.name:
        raise refuse(ErrorCode.INVALID_REQUEST, f"`mlxd keys ls` takes no name, not {args.name!r}")
    if args.what != "ls" and not args.name:
        raise refuse(ErrorCode.INVALID_REQUEST, f"`mlxd keys {args.what}` needs a name")
    if args.key and args.what != "add":
        raise refuse(ErrorCode.INVALID_REQUEST, "--key goes with `mlxd keys add`")
    if args.what == "add":
        key = keys.add(data_dir, args.name, sys.stdin.readline().strip() if args.key else "")
        print(f"{args.name} may ask now" if args.key else key)
    elif args.what == "rm":
        confirm(f"Remove the key of {args.name}?", yes=args.yes)
        if not keys.remove(data_dir, args.name):
            print(
                "mlxd: note: that was the last key: everybody who reaches the server may ask", file=sys.stderr
            )
    else:
        _list(keys.read(data_dir).keys, as_json=args.json)
    return 0


def _list(found: list[keys.Key], *, as_json: bool) -> None:
    if as_json:
        rows = [{"name": each.name, "created": each.created} for each in found]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif not found:
        print("no keys: everybody who reaches the server may ask")
    else:
        rows_shown = [[each.name, time.strftime("%Y-%m-%d", time.localtime(each.created))] for each in found]
        print_table(["NAME", "SINCE"], rows_shown)
