"""Let a model of the running server go, and wait until its memory is back.

mlxd unload org/name            its running answers may finish first
mlxd unload org/name --now      they end with an error
mlxd unload org/name --if-idle  only if there are none
"""

import argparse
from urllib.parse import quote

from parent.commands import options
from parent.commands.running import call, require_running


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="a name in `mlxd ps`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--now", dest="mode", action="store_const", const="now", default="drain", help="cut running answers"
    )
    how.add_argument("--if-idle", dest="mode", action="store_const", const="if-idle", help="only an idle one")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    running = require_running(options.settings_of(args).data_dir)
    path = f"/v1/models/{quote(args.model, safe='')}/unload"
    answer = call(running, "POST", path, {"mode": args.mode, "wait": True}, timeout_s=None)
    print(f"{answer['model']} is {answer['state']}")
    return 0
