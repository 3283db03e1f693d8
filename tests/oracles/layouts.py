"""The same weights as checkpoints of different origin lay them out.

`fused`: as the modules of transformers 5 have them. `hub`: as Hugging Face's hub has most models, a module an expert.
`mlx`: as MLX's converter writes them, experts stacked, `kv_b_proj` of latent attention in two.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


def fused(tensors: Arrays, config: Config) -> Arrays:
    """As they are."""
    return dict(tensors)


def hub(tensors: Arrays, config: Config) -> Arrays:
    """A module an expert; gpt-oss in blocks of 4-bit numbers."""
    if config["model_type"] == "gpt_oss":
        return _in_blocks(tensors)
    out: Arrays = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".experts"):
            out[name] = value
            continue
        for part, rows in _parts(leaf, value).items():
            for number, weight in enumerate(rows):
                out[f"{module}.{number}.{part}.weight"] = weight
    return out


def mlx(tensors: Arrays, config: Config) -> Arrays:
    """Stacks of experts and of heads; Qwen 3.5 with whole norms, channels of convolutions last."""
    gpt_oss = config["model_type"] == "gpt_oss"
    tensors = _whole_norms(tensors) if config["model_type"].startswith("qwen3_5") else tensors
    out: Arrays = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith(".experts") and gpt_oss:
            is_bias = leaf.endswith("_bias")
            turned = value if is_bias else value.swapaxes(-1, -2)
            parts = {"down_proj": turned}
            if leaf.startswith("gate_up"):
                parts = {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]}
            for part, one in parts.items():
                out[f"{module}.{part}.{'bias' if is_bias else 'weight'}"] = np.ascontiguousarray(one)
        elif module.endswith(".experts"):
            is_gemma = config["model_type"].startswith("gemma4")
            stacks = f"{module}.switch_glu" if is_gemma else f"{module.removesuffix('.experts')}.switch_mlp"
            for part, one in _parts(leaf, value).items():
                out[f"{stacks}.{part}.weight"] = np.ascontiguousarray(one)
        elif module.endswith(".kv_b_proj"):
            attention, nope = module.removesuffix(".kv_b_proj"), config["qk_nope_head_dim"]
            heads = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
            out[f"{attention}.embed_q.weight"] = np.ascontiguousarray(heads[:, :nope].swapaxes(-1, -2))
            out[f"{attention}.unembed_out.weight"] = np.ascontiguousarray(heads[:, nope:])
        else:
            out[name] = value
    return out


LAYOUTS: Mapping[str, Callable[[Arrays, Config], Arrays]] = {"hub": hub, "fused": fused, "mlx": mlx}


def wrapped(tensors: Arrays, layout: str) -> Arrays:
    """The same model inside a multimodal one, of which there are some tensors too, all of `[8, 32]`."""
    around = {"mlx": "language_model.model."}.get(layout, "model.language_model.")
    head = {"mlx": "language_model.lm_head."}.get(layout, "lm_head.")
    out: Arrays = {}
    for name, value in tensors.items():
        is_head = name.startswith("lm_head.")
        out[(head if is_head else around) + name.removeprefix("lm_head." if is_head else "model.")] = value
    towers = ("vision_tower.", "audio_tower.", "embed_vision.", "visual.", "multi_modal_projector.")
    for tower in towers:
        out[f"{'' if layout == 'mlx' else 'model.'}{tower}proj.weight"] = np.ones((8, 32), np.float32)
    if any("linear_attn" in name for name in tensors):
        out["mtp.fc.weight"] = np.ones((8, 32), np.float32)
    return out


def _whole_norms(tensors: Arrays) -> Arrays:
    out: Arrays = {}
    for name, value in tensors.items():
        if name.endswith("conv1d.weight"):
            value = np.ascontiguousarray(value.swapaxes(1, 2))
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + np.float32(1)
        out[name] = value
    return out


def _parts(leaf: str, value: NDArray[Any]) -> Arrays:
    """A fused stack by projection."""
    if leaf == "down_proj":
        return {"down_proj": value}
    wide = value.shape[1] // 2
    return {"gate_proj": value[:, :wide], "up_proj": value[:, wide:]}


def _in_blocks(tensors: Arrays) -> Arrays:
    """Experts of gpt-oss as OpenAI published them; needs mlx."""
    import mlx.core as mx

    out: Arrays = {}
    for name, value in tensors.items():
        if ".experts." not in name or name.endswith("_bias"):
            out[name] = value
            continue
        weight, scales = mx.quantize(mx.array(value.swapaxes(-1, -2)), mode="mxfp4")
        words = np.array(weight)
        out[f"{name}_blocks"] = words.view(np.uint8).reshape(*words.shape[:2], -1, 16)
        out[f"{name}_scales"] = np.array(scales)
    return out
