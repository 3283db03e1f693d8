"""A launch record to weights in an engine: check before anything is mapped, report progress, refuse in one line.

Weights are loaded on the engine thread, which is the only one that may touch them. The caller goes on meanwhile:
the rest of the worker is imported and the tokenizer is read while the weights come in.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.checkpoint import Checkpoint, inspect
from shared.control import LaunchModel
from shared.encoders import FORWARD_CPU, FORWARD_GPU, is_encoder
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.units import format_bytes
from worker.embed.sentence import read_sentence
from worker.engine.engine import Engine, Loaded
from worker.engine.kv_budget import KvBudget

if TYPE_CHECKING:
    from worker.cache.store import Store
    from worker.embed.pooling import Head

Tell = Callable[[str, int, int], None]

CHUNK_GPU = 2048  # mlx-lm's prefill step
CHUNK_CPU = 128  # about half a second of a small model: a cancel waits for one chunk


@dataclass(frozen=True)
class Loading:
    """A model on its way into an engine: what it is, and the future of its weights."""

    checkpoint: Checkpoint
    weights: "Future[Loaded]"


def begin_load(launch: LaunchModel, engine: Engine, tell: Tell) -> Loading:
    """Check the model of `launch` and start reading its weights into `engine`.

    Raises `Refused` (bad_checkpoint, unsupported, cannot_fit), as the future does.
    """
    path = Path(launch.path)
    tell("inspecting", 0, 1)
    checkpoint = inspect(path)
    _check_memory(checkpoint)
    if is_encoder(checkpoint.config):
        return Loading(checkpoint, engine.load(lambda: _build_encoder(launch, checkpoint, tell)))
    return Loading(checkpoint, engine.load(lambda: _build(launch, path, tell)))


def _build_encoder(launch: LaunchModel, checkpoint: Checkpoint, tell: Tell) -> Loaded:
    """The same of an encoder: it keeps nothing of a text, and its steps are the forwards it is asked for."""
    import mlx.core as mx

    from worker.cache.prefix import PrefixCache
    from worker.embed.pooling import Head
    from worker.models import load_encoder

    sentence = read_sentence(Path(checkpoint.path), is_encoder=True)
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if on_gpu and mx.metal.is_available():
        limit_memory(mx)
    loaded = load_encoder(
        checkpoint,
        dtype=launch.dtype,
        provider=launch.provider,
        on_progress=lambda done, total: tell("weights", done, total),
    )
    head = Head(sentence, loaded.model.width)
    return Loaded(
        model=loaded.model,
        prefix=PrefixCache(0, lambda length: 0),
        max_rows=1,
        prefill_chunk=launch.prefill_chunk or (FORWARD_GPU if on_gpu else FORWARD_CPU),
        pooling=head,
        description={
            "dtype": str(loaded.dtype).rpartition(".")[2],
            "kv_bytes_per_token": 0,
            "weights_bytes": loaded.weights_bytes,
            "device": "gpu" if on_gpu else "cpu",
        },
    )


def _build(launch: LaunchModel, path: Path, tell: Tell) -> Loaded:
    """On the engine thread: import mlx, map and evaluate the weights."""
    import mlx.core as mx

    from worker.adapters.mount import Adapters
    from worker.cache.prefix import PrefixCache
    from worker.models import load_model

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if on_gpu and mx.metal.is_available():
        limit_memory(mx)
    model = load_model(
        path,
        dtype=launch.dtype,
        kv_cache=launch.kv_cache,
        kv_start=launch.kv_start,
        provider=launch.provider,
        on_progress=lambda done, total: tell("weights", done, total),
    )
    chunk = launch.prefill_chunk or (CHUNK_GPU if on_gpu else CHUNK_CPU)
    kv = KvBudget(model.model.layout, model.dtype.size, chunk, launch.kv_bytes)
    if not kv.most_tokens(1):
        raise refuse(
            ErrorCode.CANNOT_FIT,
            f"{path}: kv_bytes is {format_bytes(kv.limit)}, and the KV cache of the shortest request takes "
            f"{format_bytes(kv.row_bytes(1))}; raise kv_bytes",
        )
    device = "gpu" if on_gpu else "cpu"
    prefix = PrefixCache(launch.prefix_cache_bytes, model.model.regime)
    layout = list(model.model.layout)
    goes_back = [cache.goes_back for cache in model.model.make_caches()]
    store = None
    if model.provider == "native":  # only ours know how to write their caches
        store = _store(launch, model.checkpoint, goes_back, str(model.dtype), device, layout)
    return Loaded(
        model=model.model,
        prefix=prefix,
        max_rows=launch.max_rows,
        prefill_chunk=chunk,
        kv=kv,
        check_prefix=launch.check_prefix,
        store=store,
        adapters=Adapters(model.linears, model.parts, model.dtype, launch.model_id),
        pooling=_head(path, model.checkpoint),
        description={
            "dtype": str(model.dtype).rpartition(".")[2],
            "kv_bytes_per_token": kv.token_bytes,
            "weights_bytes": model.weights_bytes,
            "device": device,
        },
    )


def _head(path: Path, checkpoint: Checkpoint) -> "Head | Failure":
    """What makes a vector of a decoder's states; of one that was made to write its files may say what cannot be."""
    from worker.embed.pooling import Head

    try:
        sentence = read_sentence(path, is_encoder=False)
        return Head(sentence, int(checkpoint.config.get("hidden_size", 0)))
    except Refused as refused:
        if checkpoint.kind != "chat":
            raise
        return refused.failure


def limit_memory(mx: Any) -> None:
    """What Metal may keep: weights stay wired up to the working set that it recommends, as mlx-lm does; of memory that
    was freed an eighth of that is kept for the next step, the rest goes back, so that the ledger's numbers are true.
    """
    most = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(most)
    mx.set_cache_limit(most // 8)


def _store(
    launch: LaunchModel, checkpoint: Checkpoint, goes_back: list[bool], *facts: object
) -> "Store | None":
    """Where kept prompts lie between two workers; `facts`: what their arrays depend on besides the model."""
    from worker.cache.store import Store, identity_of

    if not launch.spill_dir or not launch.spill_bytes or not launch.prefix_cache_bytes:
        return None
    try:
        identity = identity_of(checkpoint, *facts)
    except OSError:  # the model's files are gone: what is loaded serves on, and nobody will come back to it
        return None
    return Store(
        Path(launch.spill_dir),
        identity,
        goes_back,
        max_bytes=launch.spill_bytes,
        floor_bytes=launch.disk_floor_bytes,
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
