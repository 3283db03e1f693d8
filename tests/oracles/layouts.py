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
    """Stacks of experts and of heads."""
    gpt_oss = config["model_type"] == "gpt_oss"
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
            stacks = f"{module.removesuffix('.experts')}.switch_mlp"
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
