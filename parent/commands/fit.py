"""Say whether a model fits in this machine's memory, and show the arithmetic.

  mlxd fit
  mlxd fit starter --context 8192

Weights, the KV caches of all rows at that context, the prefix cache and the widest moment of one step, against
the memory that models may have: what a busy server needs. Exit code 0: fits; 1: does not.
"""

import argparse

from parent.commands import options
from parent.commands.finding import library_of, named
from parent.config import Settings, for_model
from parent.library.catalog import ModelEntry
from parent.library.fit import bill, explain
from parent.library.machine import find_device
from shared.errors import ErrorCode, refuse

_COUNTED = ("dtype", "max_rows", "prefill_chunk", "prefix_cache_bytes", "kv_cache", "kv_start")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=options.name, help="a name in `mlxd ls`, or a model folder"
    )
    parser.add_argument("--context", metavar="N", type=int, help="tokens, prompt and answer (default: all)")
    options.add_settings(parser, (*options.LIBRARY, *_COUNTED))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    library = library_of(resolved.settings, resolved.models)
    entry = library.default() if args.model is None else named(library, args.model)
    settings = for_model(resolved.settings, library.options(entry.id))
    tokens = context_of(settings, entry, args.context)
    fit = bill(
        entry,
        tokens,
        find_device(settings.memory_budget_bytes),
        settings,
    )
    print(f"{entry.id}, {fit.context} tokens of context")
    print("\n".join(explain(fit)))
    return 0 if fit.fits else 1


def context_of(settings: Settings, entry: ModelEntry, asked: int | None) -> int:
    """Tokens to count for. Raises `Refused` for a broken model or a context out of range."""
    if entry.error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{entry.id}: {entry.error}")
    tokens = asked if asked is not None else settings.max_context or entry.context
    if asked is None and tokens <= 0:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{entry.id} does not say its context; give --context")
    if tokens <= 0:
        raise refuse(ErrorCode.INVALID_REQUEST, f"--context {tokens}: write a number of tokens above 0")
    if entry.context and tokens > entry.context:
        if asked is None:
            return entry.context
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"--context {tokens}: {entry.id} was made for {entry.context}"
        )
    return tokens
