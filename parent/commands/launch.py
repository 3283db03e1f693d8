"""Start a coding agent that works with the running server. Its configuration is one of its own, not yours.

  mlxd launch claude
  mlxd launch codex --model org/name
  mlxd launch opencode -- run "Explain this folder"
  mlxd launch claude --dry-run

What stands after `--` goes to the agent.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from parent.commands import options
from parent.commands.clients import CLIENTS, KEY, Asked, Client, Model, Plan, shown, small_of
from parent.commands.running import Running, call, engine_state, require_running
from shared.errors import ErrorCode, refuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", choices=list(CLIENTS), help=", ".join(CLIENTS))
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=options.name,
        help="a name in `mlxd ls` (default: the server's default)",
    )
    parser.add_argument(
        "--small-model",
        metavar="MODEL",
        type=options.name,
        help="for small tasks (default: the smallest in memory)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be set up, and start nothing"
    )
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    data_dir = options.settings_of(args).data_dir
    running = require_running(data_dir)
    client = CLIENTS[args.client]
    models = msgspec.convert(call(running, "GET", "/v1/models")["data"], list[Model])
    model = _model(running, models, args.model)
    small = _named(running, args.small_model) if args.small_model else small_of(models, model)
    folder = data_dir / "launch" / args.client
    key = running.key and ("THE-LOCAL-KEY" if args.dry_run else running.key)
    plan = client.plan(Asked(running.url, model, small, str(folder), key or KEY))
    if args.dry_run:
        print(shown(plan, str(folder), [shlex.quote(word) for word in [client.program, *args.passed_on]]))
        return 0
    program = find(client, os.environ, Path.home())
    if "tools" not in model.capabilities:
        print(f"mlxd: note: {model.id} may not know how to call tools, which agents need", file=sys.stderr)
    write(plan, folder)
    sys.stdout.flush()
    os.execve(program, [client.program, *args.passed_on], environment(plan, os.environ))


def _model(running: Running, models: list[Model], wanted: str | None) -> Model:
    """The model of this name, else the server's default, else the first that can chat. Raises `Refused`."""
    if wanted:
        return _named(running, wanted)
    default: dict[str, Any] = engine_state(running).get("model") or {}
    chats = [each for each in models if "chat" in each.capabilities]
    chats.sort(key=lambda each: (each.id != default.get("id"), not each.resident))
    if not chats:
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND,
            "the server has no model that can chat; `mlxd pull starter` fetches one",
        )
    return chats[0]


def _named(running: Running, name: str) -> Model:
    """What the server says of a model, under the name that was given: it may ask for a profile."""
    found = msgspec.convert(call(running, "GET", f"/v1/models/{quote(name)}"), Model)
    return msgspec.structs.replace(found, id=name)


def find(client: Client, environ: Mapping[str, str], home: Path) -> str:
    """The client's program. Raises `Refused` saying how to install it."""
    places = [environ.get("PATH", os.defpath), *(str(home / place) for place in client.places)]
    program = shutil.which(client.program, path=os.pathsep.join(places))
    if program is None:
        raise refuse(
            ErrorCode.NOT_FOUND, f"{client.program} is not installed; `{client.install}` installs it"
        )
    return program


def write(plan: Plan, folder: Path) -> None:
    """The client's folder, which keeps its sessions from one launch to the next, and the files of the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        (folder / name).write_text(text, encoding="utf-8")


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, as the plan changes it."""
    return {name: value for name, value in environ.items() if name not in plan.unset} | plan.env
