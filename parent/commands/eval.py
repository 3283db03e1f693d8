"""Measure a model: perplexity on a text, how far it is from another one, tasks of lm-evaluation-harness.

  mlxd eval starter
  mlxd eval my/quantized --reference my/model --data held-out.txt
  mlxd eval starter --adapter my-adapter --data my-dataset
  mlxd eval --history

The running server does it, where there is one and the text is a data set of its; else a process of this command. What
was found is kept, and shown beside what it was before.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from parent.commands import options
from parent.commands.finding import library_of, named
from parent.commands.measuring import history_here, history_there, measure_here, measure_there, show
from parent.commands.running import find_running
from parent.config import Settings
from parent.library.adapters import parsed
from shared.errors import ErrorCode, refuse
from shared.lab import Evaluate


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument("--adapter", type=options.name, help="measure it with this adapter")
    parser.add_argument("--reference", type=options.name, metavar="MODEL", help="tell KL against this model")
    parser.add_argument("--data", type=options.name, help="a text, a JSONL file, or the name of a data set")
    parser.add_argument("--num-samples", type=int, help="rows of tokens (default 32)")
    parser.add_argument("--sequence-length", type=int, help="tokens of a row (default 512)")
    parser.add_argument("--tasks", help="of lm-evaluation-harness, with commas between; needs mlxd[eval]")
    parser.add_argument("--task-limit", type=int, help="questions of each task")
    parser.add_argument("--seed", type=int, help="of the order of a data set's rows")
    parser.add_argument("--history", action="store_true", help="show what was measured, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.add_settings(parser, (*options.LIBRARY, "adapter_roots"))


_FIELDS = ("adapter", "reference", "data", "num_samples", "sequence_length", "task_limit", "seed")


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    settings = resolved.settings
    running = find_running(settings.data_dir)
    if args.history:
        rows = (
            history_there(running, args.model or "", "evaluate")
            if running is not None
            else asyncio.run(history_here(settings, args.model or "", "evaluate"))
        )
        show(rows, as_json=args.json)
        return 0
    if not args.model:
        raise refuse(ErrorCode.INVALID_REQUEST, "name the model to measure, or give --history")
    given = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    if args.tasks:
        given["tasks"] = [task.strip() for task in args.tasks.split(",") if task.strip()]
    if running is not None and not _is_path(settings, given.get("data", "")):
        show(measure_there(running, {"kind": "evaluate", "model": args.model, **given}), as_json=args.json)
        return 0
    if args.data:
        given["data"] = str(_data(settings, args.data))
    library = library_of(settings, resolved.models)
    entry = named(library, args.model)
    given |= {"model": str(entry.path), "model_id": entry.id}
    if args.adapter:
        [adapter, *more] = library.adapters(entry, parsed(args.adapter)) or [None]
        if adapter is None or more:
            raise refuse(ErrorCode.INVALID_REQUEST, "name one adapter; fuse or merge several first")
        given["adapter"] = str(adapter.path)
    if args.reference:
        given["reference"] = str(named(library, args.reference).path)
    if running is not None:
        given["url"] = running.url
    show(measure_here(settings, _spec(given)), as_json=args.json)
    return 0


def _spec(given: dict[str, Any]) -> Evaluate:
    try:
        return msgspec.convert(given, Evaluate)
    except msgspec.ValidationError as error:
        said = str(error)
        raise refuse(ErrorCode.INVALID_REQUEST, f"{said[:1].lower()}{said[1:]}") from None


def _is_path(settings: Settings, data: str) -> bool:
    """A file or folder elsewhere: the server reads only data sets of its own."""
    return bool(data) and not (settings.data_dir / "datasets" / data).is_dir()


def _data(settings: Settings, data: str) -> Path:
    own = settings.data_dir / "datasets" / data
    place = own if own.is_dir() else Path(data).expanduser().absolute()
    if not place.exists():
        raise refuse(ErrorCode.NOT_FOUND, f"{data} is no file, and no data set in {own.parent}", param="data")
    return place
