"""Say whether a model fits in this machine's memory, and show the arithmetic.

  mlxd fit
  mlxd fit starter --context 8192

Weights, the KV caches of all rows at that context, the prefix cache and the widest moment of one step, against
the memory that there is: what a busy server needs. Exit code 0: fits; 1: does not.
"""

import argparse
import re

from parent.commands import options
from parent.commands.machine import Device, find_device
from parent.config import Settings
from parent.library.catalog import ModelEntry, default_entry, float_type, resolve, scan
from parent.library.fit import CHUNK_CPU, CHUNK_GPU, Fit, Shape, explain, loaded_bytes, transient_bytes
from shared.checkpoint import inspect, kv_bytes, kv_bytes_per_token, tensors_of
from shared.errors import ErrorCode, refuse

_COUNTED = ("dtype", "max_rows", "prefill_chunk", "prefix_cache_bytes")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=options.name, help="a name in `mlxd ls`, or a model folder"
    )
    parser.add_argument("--context", metavar="N", type=int, help="tokens, prompt and answer (default: all)")
    options.add_settings(parser, ("data_dir", *_COUNTED))


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    entries = scan(settings.data_dir)
    entry = default_entry(entries) if args.model is None else resolve(args.model, entries)
    tokens = context_of(settings, entry, args.context)
    fit = bill(settings, entry, tokens, find_device())
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


def bill(settings: Settings, entry: ModelEntry, tokens: int, device: Device) -> Fit:
    """The arithmetic for one model on one device. Raises `Refused` when the weights are not those of the config."""
    facts = inspect(entry.path)
    config = facts.config
    held = {int(found[1]) for name in tensors_of(facts) if (found := _LAYER.search(name))}
    if held and len(held) < config["num_hidden_layers"]:
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{entry.path / 'config.json'}: num_hidden_layers is {config['num_hidden_layers']}, but the weights "
            f"hold {len(held)} layers; download the model again",
        )
    own = "float32" if device.kind == "cpu" else float_type(facts.dtypes)
    float32 = (own if settings.dtype == "auto" else settings.dtype) == "float32"
    element = 4 if float32 else 2
    chunk = settings.prefill_chunk or (CHUNK_CPU if device.kind == "cpu" else CHUNK_GPU)
    shape = Shape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        vocab=config["vocab_size"],
    )
    return Fit(
        weights_bytes=loaded_bytes(facts.dtypes, float32=float32),
        context=tokens,
        rows=settings.max_rows,
        row_bytes=kv_bytes(facts, tokens, element),
        kv_bytes_per_token=kv_bytes_per_token(facts, element),
        prefix_bytes=settings.prefix_cache_bytes,
        chunk=chunk,
        transient_bytes=transient_bytes(shape, tokens, chunk, settings.max_rows, scores=device.kind == "cpu"),
        memory_bytes=device.memory_bytes,
        memory_name="memory" if device.shares_memory else "GPU memory",
    )
