"""Load a model into the running server, and wait until it is ready.

mlxd load org/name
"""

import argparse
from urllib.parse import quote

from parent.commands import options
from parent.commands.running import call, require_running


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="a name in `mlxd ls`")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    running = require_running(options.settings_of(args).data_dir)
    path = f"/v1/models/{quote(args.model, safe='')}/load"
    answer = call(running, "POST", path, {"wait": True}, timeout_s=None)
    print(f"{answer['model']} is {answer['state']}")
    return 0
