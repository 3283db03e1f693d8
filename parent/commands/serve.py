"""Serve the models of the library: the OpenAI-compatible API, the chat page, and workers that come back when they die.

  mlxd serve                      with the only model, or the starter (which it offers to fetch), loaded at start
  mlxd serve SmolLM2-135M-Instruct --port 9000
  mlxd serve ~/models/my-llama    a model folder anywhere

On a desktop the chat page opens in the browser. Ctrl-C ends it: running answers may finish first.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable

from parent import keys
from parent.access import is_loopback
from parent.commands import options
from parent.commands.choosing import choose_model
from parent.commands.leaving import leave_with
from parent.commands.terminal import is_interactive
from parent.config import fields
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.server import serve
from parent.workers.blas import choose, worker_env
from shared import logs
from shared.errors import ErrorCode, refuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="MODEL", nargs="?", type=options.name, help="a name in `mlxd ls`, or a model folder"
    )
    opening = parser.add_mutually_exclusive_group()
    opening.add_argument(
        "--open", dest="open", action="store_true", default=None, help="open the page in the browser"
    )
    opening.add_argument("--no-open", dest="open", action="store_false", help="only print its address")
    parser.add_argument("--yes", action="store_true", help="fetch the starter model without asking")
    parser.add_argument("--leave-with-fd", type=int, help=argparse.SUPPRESS)
    options.add_settings(parser, tuple(fields()))


def run(args: argparse.Namespace) -> int:
    if args.leave_with_fd is not None:
        leave_with(args.leave_with_fd)
    live = options.live_of(args, **({"model": args.name} if args.name else {}))
    settings = live.settings
    library = Library(lambda: live.settings, lambda: live.models)
    library.scan()
    entry = choose_model(library, settings, yes=args.yes)
    if entry.error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"cannot serve {entry.id}: {entry.error}")
    as_json = {"auto": None, "plain": False, "json": True}[settings.log_format]
    logs.configure(settings.log_level, json=as_json)
    env, _ = worker_env(settings)
    if advice := choose(settings).advice:
        print(f"mlxd: note: the worker gets a slow BLAS; {advice}", file=sys.stderr)
    if not is_loopback(settings.host) and not keys.read(settings.data_dir).keys:
        note = f"everybody who reaches {settings.host} may ask; `mlxd keys add NAME` changes that"
        print(f"mlxd: note: {note}", file=sys.stderr)
    opens = is_desktop(os.environ) and is_interactive() if args.open is None else args.open
    return serve(
        live,
        library,
        default=entry.id,
        worker_env={**env, "MLXD_LOG_LEVEL": settings.log_level},
        on_listening=announcement(entry, opens=opens),
        keep_fds=() if args.leave_with_fd is None else (args.leave_with_fd,),
    )


def is_desktop(environ: os._Environ[str] | dict[str, str]) -> bool:
    """A browser opened here would be seen: a display, and nobody logged in from elsewhere."""
    if "SSH_CONNECTION" in environ:
        return False
    return sys.platform == "darwin" or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def announcement(entry: ModelEntry, *, opens: bool) -> Callable[[str], None]:
    """What to do once the server listens: print the address, and open it where that makes sense.

    Without a key, which everybody on the machine could read in the list of processes.
    """

    def announce(url: str) -> None:
        print(f"{entry.id} at {url}", flush=True)
        if opens:
            import webbrowser  # here: services never need it

            # A browser may take seconds to come up, and the event loop must not wait for it.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    return announce
