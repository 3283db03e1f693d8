"""A checkpoint of any origin as MLX lays it out: experts and heads stacked, one spelling of names, nothing quantized.

What is not run by a text model is left out: towers for images and sound, layers that guess further ahead. Nothing is
read here: a tensor is when it is first evaluated. Names and forms are those that mlx-lm 0.32 writes, so that what comes
out is the same as there, to the byte.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from shared.checkpoint import Checkpoint, inspect
from shared.errors import ErrorCode, Refused, refuse
from worker.measure.streamed import unread_decoder
from worker.models import FAMILIES
from worker.models.wrapped import TOWERS
from worker.weights import multiply_out, unread_tensors, written_scheme

Tensors = dict[str, mx.array]

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
NEVER_CAST = (".e_score_correction_bias", ".A_log")
_WRAPPED_ALWAYS = ("qwen3_5", "qwen3_5_moe")
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+_proj)\.(weight|bias)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_RANGES = ("input_max", "input_min", "output_max", "output_min")


@dataclass
class Source:
    """A model that is about to be quantized.

    `config`: the normalised one, for graphs; `written`: config.json as it shall be but for the quantization. `kept`:
    modules that stay as they are, and how they are quantized. `was`: how the source was quantized, "" = not at all.
    `left_out`: beginnings of names that were.
    """

    checkpoint: Checkpoint
    config: dict[str, Any]
    written: dict[str, Any]
    tensors: Tensors
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    was: str = ""
    left_out: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        return self.checkpoint.model_type

    @property
    def as_checkpoint(self) -> Checkpoint:
        """What graphs over `tensors` are built by."""
        config = {**self.config, "quantization": dict(self.kept)} if self.kept else self.config
        return msgspec.structs.replace(self.checkpoint, config=config, quantization="")

    def cast(self) -> None:
        """Give floating point tensors the type that config.json names, as the last step before quantizing."""
        wanted = _DTYPES.get(str(self.config.get("dtype", "")))
        for name, tensor in self.tensors.items():
            if wanted is None or name.endswith(NEVER_CAST) or name.rpartition(".")[0] in self.kept:
                continue
            if mx.issubdtype(tensor.dtype, mx.floating) and tensor.dtype != wanted:
                self.tensors[name] = tensor.astype(wanted)


def open_source(path: Path) -> Source:
    """The model directory at `path`. Raises `Refused` (bad_checkpoint, unsupported)."""
    checkpoint = inspect(path)
    if checkpoint.model_type not in FAMILIES:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{path}: models of family {checkpoint.model_type!r} cannot be quantized here; those that can: "
            f"{', '.join(FAMILIES)}. `mlx_lm.convert -q` may know it",
            param="model",
        )
    unread_decoder(
        checkpoint, "float32"
    )  # names, shapes and quantization fit the config, or it says what does not
    tensors = unread_tensors(checkpoint)
    kept = _kept(checkpoint, tensors)
    multiplied = multiply_out(checkpoint, tensors, kept)
    source = Source(
        checkpoint,
        {key: value for key, value in checkpoint.config.items() if key != "quantization"},
        {},
        {},
        was=checkpoint.quantization if multiplied else "",
    )
    _arrange(source, tensors, kept)
    source.written = _written(path, source)
    source.tensors = dict(sorted(source.tensors.items(), key=lambda item: _natural(item[0])))
    return source


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor or module is in."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def is_stack(module: str) -> bool:
    """Whether the matrices of this module are stacked: of experts or of heads."""
    return any(
        part in module for part in (".switch_mlp.", ".switch_glu.", ".mlp.experts.")
    ) or module.endswith((".embed_q", ".unembed_out"))


# ---------------------------------------------------------------- quantized sources


def _kept(checkpoint: Checkpoint, tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Experts of gpt-oss in mxfp4: so they were trained, and anything else made of them would be worse."""
    if checkpoint.model_type != "gpt_oss":
        return {}
    scheme: dict[str, Any] = checkpoint.config.get("quantization") or {}
    modules = {
        name.rpartition(".")[0] for name in tensors if name.endswith(".scales") and ".experts." in name
    }
    found = {module: written_scheme(scheme, module) for module in modules}
    blocks = {name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")}
    mxfp4 = {module for module, how in found.items() if how.get("mode") == "mxfp4"} | blocks
    return {module: {"group_size": 32, "bits": 4, "mode": "mxfp4"} for module in sorted(mxfp4)}


# ---------------------------------------------------------------- one layout


def _arrange(source: Source, tensors: Tensors, kept: Mapping[str, dict[str, Any]]) -> None:
    """Fill `source` with `tensors` under MLX's names and in its forms."""
    family, config = source.family, source.config
    is_wrapped = any(name.startswith(("model.language_model.", "language_model.")) for name in tensors)
    renamed: Tensors = {}
    left_out: set[str] = set()
    names: dict[str, str] = {}
    for old, tensor in tensors.items():
        if part := _unused(old, source):
            left_out.add(part)
            continue
        new = _name(old, is_wrapped=is_wrapped or family in _WRAPPED_ALWAYS)
        renamed[new] = tensor
        names[old.rpartition(".")[0]] = new.rpartition(".")[0]
    source.left_out = sorted(left_out)
    source.kept = {names.get(module, module): how for module, how in kept.items()}
    if family == "gpt_oss":
        renamed = _gpt_oss(renamed, source)
    elif config.get("num_experts"):
        renamed = _stacked(renamed, family, int(config["num_experts"]))
    if "kv_lora_rank" in config:
        renamed = _latent(renamed, config)
    if family.startswith("qwen3_5"):
        renamed = _qwen3_5(renamed)
    source.tensors = renamed


def _unused(name: str, source: Source) -> str:
    """What a tensor is part of that is left out, "" = nothing."""
    bare = name.removeprefix("model.")
    if bare.startswith(TOWERS):
        return next(tower for tower in TOWERS if bare.startswith(tower)).rstrip(".")
    if "rotary_emb" in name:
        return "rotary_emb"
    if bare.startswith("mtp."):
        return "mtp"
    if source.config.get("tie_word_embeddings") and "lm_head." in name:
        return "lm_head"
    layer = layer_of(name)
    if layer is None:
        return ""
    depth = int(source.config["num_hidden_layers"])
    if layer >= depth:
        return "prediction layers"
    if source.family.startswith("gemma4"):
        if any(part in name for part in _RANGES):
            return "ranges"
        owners = depth - int(source.config.get("num_kv_shared_layers") or 0)
        unused = (".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.k_norm")
        if layer >= owners and any(part in name for part in unused):
            return "keys of layers that use those of others"
    return ""


def _name(name: str, *, is_wrapped: bool) -> str:
    if not is_wrapped:
        return name
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name if name.startswith("language_model.") else f"language_model.{name}"


def _stacked(tensors: Tensors, family: str, count: int) -> Tensors:
    """Experts by themselves, or two projections in one, as stacks."""
    leaf = "experts.switch_glu" if family.startswith("gemma4") else "switch_mlp"
    out: Tensors = {}
    apart: dict[str, dict[int, mx.array]] = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".experts.")
        if found := _EXPERT.fullmatch(name):
            stack = f"{found[1]}.{leaf}.{found[3]}.{found[4]}"
            apart.setdefault(stack, {})[int(found[2])] = tensor
        elif base and last == "gate_up_proj":
            wide = tensor.shape[-2] // 2
            out[f"{base}.{leaf}.gate_proj.weight"] = mx.contiguous(tensor[..., :wide, :])
            out[f"{base}.{leaf}.up_proj.weight"] = mx.contiguous(tensor[..., wide:, :])
        elif base and last == "down_proj":
            out[f"{base}.{leaf}.down_proj.weight"] = tensor
        else:
            out[name] = tensor
    for stack, parts in apart.items():
        out[stack] = mx.stack([parts[number] for number in range(count)])
    return out


def _gpt_oss(tensors: Tensors, source: Source) -> Tensors:
    """Rows of gate and up, which take turns, apart; blocks of 16 bytes as words of 8 numbers."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".experts.")
        fused = "gate_up_proj" if last.startswith("gate_up_proj") else "down_proj"
        suffix = last.removeprefix(fused)
        if not base or suffix not in ("", "_blocks", "_scales", "_bias"):
            out[name] = tensor
            continue
        leaf = {"": "weight", "_blocks": "weight", "_scales": "scales", "_bias": "bias"}[suffix]
        if suffix == "_blocks":
            tensor = tensor.view(mx.uint32).flatten(-2)
        elif not suffix:
            tensor = tensor.swapaxes(-1, -2)
        how = source.kept.pop(f"{base}.experts.{fused}", None)
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        for number, part in enumerate(parts):
            out[f"{base}.experts.{part}.{leaf}"] = mx.contiguous(tensor[:, number :: len(parts)])
            if how is not None:
                source.kept[f"{base}.experts.{part}"] = how
    return out


def _latent(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """`kv_b_proj` as the two stacks of heads that latent attention uses."""
    heads, nope = int(config["num_attention_heads"]), int(config["qk_nope_head_dim"])
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(".kv_b_proj.weight"):
            out[name] = tensor
            continue
        attention = name.removesuffix(".kv_b_proj.weight")
        rows = tensor.reshape(heads, tensor.shape[0] // heads, -1)
        out[f"{attention}.embed_q.weight"] = mx.contiguous(rows[:, :nope].swapaxes(-1, -2))
        out[f"{attention}.unembed_out.weight"] = mx.contiguous(rows[:, nope:])
    return out


def _qwen3_5(tensors: Tensors) -> Tensors:
    """Channels of convolutions last and norms whole, where they are not."""
    is_hub = any(name.endswith("conv1d.weight") and one.shape[-1] != 1 for name, one in tensors.items())
    if not is_hub:
        return tensors
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.moveaxis(2, 1)
        elif name.endswith(_NORMS):
            tensor = tensor + 1.0
        out[name] = tensor
    return out


# ---------------------------------------------------------------- config.json


def _written(path: Path, source: Source) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for each in (config, config.get("text_config")):
        for key in ("quantization", "quantization_config"):
            if isinstance(each, dict):
                each.pop(key, None)
    if any(tower.rstrip(".") in source.left_out for tower in TOWERS):
        for key in ("vision_config", "audio_config"):
            config.pop(key, None)
    return config


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def bad_source(path: str, error: Exception) -> Refused:
    """A file that was there when it was looked at and cannot be read to its end."""
    reason = " ".join(str(error).split())[:200]
    return refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: cannot be read ({reason}); download the model again")
