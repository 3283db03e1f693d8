"""From a model directory to a loaded model: the table of families, and `load_model`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from shared.checkpoint import Checkpoint, inspect
from shared.errors import ErrorCode, refuse
from shared.kv_layout import LayerKv, kept_as
from worker.cache.kv import LayerCache
from worker.layers.batch import Batch
from worker.layers.linear import Linear
from worker.models import (
    bert,
    deepseek,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    llama,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    smollm3,
)
from worker.providers import choose_provider
from worker.weights import Progress, Weights


class DecoderModel(Protocol):
    """What the engine needs of a model. Every call only builds graph; whoever reads a value evaluates it.

    `layout`: of the caches that `make_caches` gives; set anew before the first call to have them keep tokens otherwise.
    """

    layout: Sequence[LayerKv]

    def __call__(self, batch: Batch) -> mx.array:
        """Final-norm hidden states [T, D] of the batch's tokens, whose keys and values go into its rows' caches."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of hidden states [..., D]."""
        ...

    def make_caches(self, length: int = 0) -> list[LayerCache]:
        """Empty caches. `length`: tokens known to come, for rope kinds that depend on it."""
        ...

    def regime(self, length: int) -> Hashable:
        """Keys cached for a sequence of one length may be reused in one of another where this is the same for both."""
        ...


Build = Callable[[Checkpoint, Weights], DecoderModel]

FAMILIES: Mapping[str, Build] = {
    "llama": llama.build,
    "mistral": llama.build,
    "ministral3": llama.build,
    "smollm3": smollm3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "phi3": phi3.build,
    "qwen3_moe": qwen3_moe.build,
    "glm4_moe": glm4_moe.build,
    "glm4_moe_lite": deepseek.build,
    "gpt_oss": gpt_oss.build,
    "deepseek_v3": deepseek.build,
    **dict.fromkeys(("gemma3", "gemma3_text"), gemma3.build),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), gemma4.build),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5.build),
}
"""`model_type` of config.json to the function that builds its graph."""

ENCODERS: Mapping[str, Callable[[Checkpoint, Weights], bert.Encoder]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), bert.build),
}
"""The same of encoders."""

_DTYPES: Mapping[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in memory. `dtype`: of the activations. `weights_bytes`: as held, measured.

    `provider`: whose graph it is, native or mlx-lm; the caches of a native one can be written to disk. `linears`: its
    projections by their modules, `parts`: of modules that are several of those in one, names and rows; for adapters.
    """

    model: DecoderModel
    checkpoint: Checkpoint
    dtype: mx.Dtype
    quantization: str
    weights_bytes: int
    provider: str = "native"
    linears: Mapping[str, Linear] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    kv_cache: str = "auto",
    kv_start: int = 0,
    provider: str = "auto",
    on_progress: Progress | None = None,
) -> LoadedModel:
    """Load the model directory at `path`. Raises `Refused` (bad_checkpoint, unsupported).

    `kv_cache`, `kv_start`, `provider`: as in the launch record. `dtype` "auto": float32 on mlx's CPU backend, the
    checkpoint's own elsewhere. `on_progress(done, total)` in bytes. Call it on the thread that will run the model.
    """
    checkpoint = inspect(path)
    provider = choose_provider(checkpoint, provider, FAMILIES)
    chosen = choose_dtype(checkpoint, dtype)
    if provider != "native":
        return _through_mlx_lm(checkpoint, chosen, kv_cache, on_progress)
    weights = Weights(checkpoint, chosen)
    model = FAMILIES[checkpoint.model_type](checkpoint, weights)
    weights.finish()
    try:
        model.layout = kept_as(checkpoint.config, kv_cache, kv_start)
    except ValueError as error:
        raise refuse(
            ErrorCode.UNSUPPORTED, f"{path}: kv_cache {kv_cache}: {error}; choose full", param="kv_cache"
        ) from None
    num_bytes = weights.materialise(on_progress)
    return LoadedModel(
        model,
        checkpoint,
        chosen,
        checkpoint.quantization,
        num_bytes,
        linears=weights.linears,
        parts=weights.parts,
    )


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with its weights in memory; the fields as in `LoadedModel`."""

    model: bert.Encoder
    checkpoint: Checkpoint
    dtype: mx.Dtype
    weights_bytes: int


def load_encoder(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    provider: str = "auto",
    on_progress: Progress | None = None,
) -> LoadedEncoder:
    """Load the encoder that was inspected. Raises and reports as `load_model` does."""
    choose_provider(checkpoint, provider, (*FAMILIES, *ENCODERS))
    chosen = choose_dtype(checkpoint, dtype)
    weights = Weights(checkpoint, chosen)
    model = ENCODERS[checkpoint.model_type](checkpoint, weights)
    weights.finish()
    return LoadedEncoder(model, checkpoint, chosen, weights.materialise(on_progress))


def _through_mlx_lm(
    checkpoint: Checkpoint, dtype: mx.Dtype, kv_cache: str, on_progress: Progress | None
) -> LoadedModel:
    """The model with mlx-lm's graph. Its caches keep tokens as they come."""
    from worker.providers import mlx_lm_model  # only here: most workers do without

    if kv_cache not in ("auto", "full"):
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: kv_cache {kv_cache}: models of provider mlx-lm keep tokens as they come; choose full",
            param="kv_cache",
        )
    model, num_bytes = mlx_lm_model.load(checkpoint, dtype, on_progress)
    return LoadedModel(model, checkpoint, dtype, checkpoint.quantization, num_bytes, "mlx-lm")


def choose_dtype(checkpoint: Checkpoint, asked: str) -> mx.Dtype:
    """The dtype of activations, norms and scales. Raises `Refused` (invalid_request, unsupported).

    On CPU anything but float32 is slow, and quantized products in bfloat16 come out wrong there: mlx keeps
    their sums in bfloat16.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if asked == "auto":
        if on_cpu:
            return mx.float32
        floats = {name: size for name, size in checkpoint.dtypes.items() if name in _SAFETENSORS}
        asked = _SAFETENSORS[max(floats, key=floats.__getitem__)] if floats else "bfloat16"
    if asked not in _DTYPES:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"dtype {asked!r} is not known; choose auto, {', '.join(_DTYPES)}",
            param="dtype",
        )
    if on_cpu and checkpoint.quantization and asked == "bfloat16":
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: quantized weights in bfloat16 give wrong text on mlx's CPU backend; "
            "choose dtype auto or float32",
            param="dtype",
        )
    return _DTYPES[asked]
