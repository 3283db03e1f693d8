"""A launch record to a `ModelContext`: check before anything is mapped, report progress, refuse in one line.

Weights are loaded on the engine thread, which is the only one that may touch them; tokenizer and template are
read on this one meanwhile.
"""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.checkpoint import Checkpoint, inspect, kv_bytes_per_token
from shared.control import LaunchModel
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes
from shared.wire import ModelFacts, Sampling
from worker.context import ModelContext
from worker.engine.engine import Engine, Loaded
from worker.text.detokenizer import DetokenizerFactory
from worker.text.reasoning import detect_format
from worker.text.template import load_template
from worker.text.tokenizer import load_tokenizer

Tell = Callable[[str, int, int], None]

CHUNK_GPU = 2048  # mlx-lm's prefill step
CHUNK_CPU = 128  # about half a second of a small model: a cancel waits for one chunk
FALLBACK_CONTEXT = 4096  # when the checkpoint does not say


async def load_context(launch: LaunchModel, engine: Engine, tell: Tell) -> ModelContext:
    """Load the model of `launch` into `engine`. Raises `Refused` (bad_checkpoint, unsupported, cannot_fit)."""
    path = Path(launch.path)
    tell("inspecting", 0, 1)
    checkpoint = inspect(path)
    _check_memory(checkpoint)
    context_size = checkpoint.context or FALLBACK_CONTEXT
    if launch.max_context:
        context_size = min(context_size, launch.max_context)
    weights = asyncio.wrap_future(engine.load(lambda: _build(launch, path, tell)))
    try:
        tokenizer = load_tokenizer(path)
        template = load_template(path, tokenizer.config, tokenizer.special)
        detokenizers = DetokenizerFactory(tokenizer)
        defaults = read_sampling_defaults(path)
    except BaseException:
        weights.cancel()
        raise
    loaded = await weights
    eos = set(checkpoint.eos_ids)
    if tokenizer.eos_id is not None:
        eos.add(tokenizer.eos_id)
    reasoning = detect_format(template.source())
    model = loaded.description
    facts = ModelFacts(
        family=checkpoint.model_type,
        context=context_size,
        vocab_size=int(checkpoint.config["vocab_size"]),
        eos_ids=sorted(eos),
        dtype=model["dtype"],
        quantization=checkpoint.quantization,
        weights_bytes=model["weights_bytes"],
        kv_bytes_per_token=kv_bytes_per_token(checkpoint, model["elem_bytes"]),
        reasoning=reasoning is not None,
        has_chat_template=bool(template.sources),
        device=model["device"],
        blas=os.environ.get("MLXD_BLAS_NAME", ""),
        defaults=defaults,
    )
    return ModelContext(
        launch.model_id, facts, tokenizer, detokenizers, template, reasoning, frozenset(eos), defaults
    )


def _build(launch: LaunchModel, path: Path, tell: Tell) -> Loaded:
    """On the engine thread: import mlx, map and evaluate the weights."""
    import mlx.core as mx

    from worker.cache.prefix import PrefixCache
    from worker.models import load_model

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if on_gpu and mx.metal.is_available():
        # Keep the weights of a model near the size of the machine wired, as mlx-lm does.
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    model = load_model(path, dtype=launch.dtype, on_progress=lambda done, total: tell("weights", done, total))
    chunk = launch.prefill_chunk or (CHUNK_GPU if on_gpu else CHUNK_CPU)
    return Loaded(
        model=model.model,
        prefix=PrefixCache(launch.prefix_cache_bytes, model.model.same_kv),
        max_rows=launch.max_rows,
        prefill_chunk=chunk,
        description={
            "dtype": str(model.dtype).rpartition(".")[2],
            "elem_bytes": model.dtype.size,
            "weights_bytes": model.weights_bytes,
            "device": "gpu" if on_gpu else "cpu",
        },
    )


def _check_memory(checkpoint: Checkpoint) -> None:
    """Weights larger than the machine's memory would only make it swap to death."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return
    if checkpoint.weights_bytes > total:
        raise refuse(
            ErrorCode.CANNOT_FIT,
            f"{checkpoint.path}: the weights have {format_bytes(checkpoint.weights_bytes)} and this machine "
            f"{format_bytes(total)} of memory; choose a smaller model or a stronger quantization",
        )


def read_sampling_defaults(path: Path) -> Sampling:
    """The numeric sampling fields of `generation_config.json`; a missing or broken file means none."""
    try:
        found = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Sampling()
    if not isinstance(found, dict):
        return Sampling()

    def number(name: str, low: float, high: float) -> Any:
        value = found.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return value if good else None

    top_k = number("top_k", 0, 1 << 31)
    top_p = number("top_p", 0, 1)
    return Sampling(
        temperature=number("temperature", 0, 100),
        top_p=top_p or None,
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0, 1),
    )
