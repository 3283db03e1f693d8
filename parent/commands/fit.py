"""Say whether a model fits in this machine's memory, and show the arithmetic.

  mlxd fit
  mlxd fit starter --context 8192

Weights, the KV cache at that context, and the widest moment of one prefill step, against the memory that
there is. Exit code 0: fits; 1: does not.
"""

import argparse

from parent.commands import options
from parent.commands.machine import memory_bytes
from parent.config import Settings
from parent.library.catalog import ModelEntry, default_entry, resolve, runs_in_float32, scan
from parent.library.fit import Fit, Shape, explain, loaded_bytes, transient_bytes
from shared.checkpoint import inspect, kv_bytes, kv_bytes_per_token
from shared.errors import ErrorCode, refuse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a name in `mlxd ls`, or a model folder")
    parser.add_argument("--context", metavar="N", type=int, help="tokens, prompt and answer (default: all)")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    entries = scan(settings.data_dir)
    entry = resolve(args.model, entries) if args.model else default_entry(entries)
    fit = bill(settings, entry, args.context)
    print(f"{entry.id}, {fit.context} tokens of context")
    print("\n".join(explain(fit)))
    return 0 if fit.fits else 1


def bill(settings: Settings, entry: ModelEntry, context: int | None) -> Fit:
    """The arithmetic for one model here. Raises `Refused` for a broken model or a context out of range."""
    if entry.error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{entry.id}: {entry.error}")
    facts = inspect(entry.path)
    tokens = context or settings.max_context or facts.context
    if tokens <= 0:
        raise refuse(ErrorCode.INVALID_REQUEST, f"--context {tokens}: write a number of tokens above 0")
    if facts.context and tokens > facts.context:
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"--context {tokens}: {entry.id} was made for {facts.context}"
        )
    float32 = runs_in_float32()
    element = 4 if float32 else 2
    config = facts.config
    shape = Shape(
        hidden=int(config.get("hidden_size", 0)),
        intermediate=int(config.get("intermediate_size", 0)),
        heads=int(config.get("num_attention_heads", 0)),
        vocab=int(config.get("vocab_size", 0)),
    )
    return Fit(
        weights_bytes=loaded_bytes(facts.dtypes, float32=float32),
        context=tokens,
        kv_bytes=kv_bytes(facts, tokens, element),
        kv_bytes_per_token=kv_bytes_per_token(facts, element),
        transient_bytes=transient_bytes(shape, tokens, settings.prefill_chunk),
        memory_bytes=memory_bytes(),
    )
