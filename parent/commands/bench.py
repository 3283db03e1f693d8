"""Measure how fast the running server answers: tokens a second and time to the first one.

  mlxd bench
  mlxd bench starter --prompt-tokens 128,2048 --streams 1,4,16
  mlxd bench --history

Prompts have exactly so many tokens, and each is new. What was found is kept, and shown beside what it was before.
"""

import argparse

from parent.commands import options
from parent.commands.measuring import history_there, measure_there, show
from parent.commands.running import require_running
from shared.errors import ErrorCode, refuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument("--prompt-tokens", metavar="N,N", help="sizes of prompts (default 128,1024)")
    parser.add_argument("--streams", metavar="N,N", help="requests at once (default 1,4)")
    parser.add_argument("--completion-tokens", type=int, metavar="N", help="tokens of an answer (default 64)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each; medians are shown (default 3)")
    parser.add_argument("--history", action="store_true", help="show what was measured, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    running = require_running(settings.data_dir)
    if args.history:
        show(history_there(running, args.model or "", "benchmark"), as_json=args.json)
        return 0
    body: dict[str, object] = {"kind": "benchmark", "model": args.model or ""}
    for name in ("prompt_tokens", "streams"):
        if text := getattr(args, name):
            body[name] = _numbers(name, text)
    for name in ("completion_tokens", "rounds"):
        if (value := getattr(args, name)) is not None:
            body[name] = value
    show(measure_there(running, body), as_json=args.json)
    return 0


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        flag = "--" + name.replace("_", "-")
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{flag}: {text!r} is no list of whole numbers, such as 128,1024"
        ) from None
