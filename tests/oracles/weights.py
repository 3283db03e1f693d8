"""Weights of the oracle models, rebuilt from a seed: nothing but numpy, so no checkpoint has to be stored.

Every tensor depends on the seed and its own name alone. numpy keeps the stream of `RandomState` frozen, and
only uniform numbers are used, so the values are the same bits on every machine and version. The scales make
logits spread (standard deviation 1 to 3) and leave no norm or bias at its neutral value, so that a wrong
transpose or a forgotten bias shows.
"""

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import hybrids

Tensors = dict[str, NDArray[np.float32]]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as the modules of transformers have them."""
    if hybrids.is_hybrid(config):
        return hybrids.shapes(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    attention = _latent if "kv_lora_rank" in config else _attention
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in attention(config).items():
            found[f"{layer}.self_attn.{name}"] = shape
        for name, shape in (_sparse if _has_experts(config, i) else _mlp)(config).items():
            found[f"{layer}.mlp.{name}"] = shape
        first = "post_feedforward" if config["model_type"] == "olmo2" else "input"
        found[f"{layer}.{first}_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    if family == "phi3":
        rows = {"qkv_proj": sum(rows.values())}
    found: dict[str, tuple[int, ...]] = {}
    for name, count in rows.items():
        found[f"{name}.weight"] = (count, hidden)
        if config.get("attention_bias") or family == "qwen2":
            found[f"{name}.bias"] = (count,)
    found["o_proj.weight"] = (hidden, heads * dim)
    if config.get("attention_bias") and family != "glm4_moe":
        found["o_proj.bias"] = (hidden,)
    if family in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        found["q_norm.weight"] = found["k_norm.weight"] = (dim,)
    if family == "olmo2":
        found["q_norm.weight"], found["k_norm.weight"] = (heads * dim,), (kv_heads * dim,)
    if family == "gpt_oss":
        found["sinks"] = (heads,)
    return found


def _latent(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Multi-head latent attention."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {}
    if compressed := config.get("q_lora_rank"):
        found["q_a_proj.weight"], found["q_a_layernorm.weight"] = (compressed, hidden), (compressed,)
        found["q_b_proj.weight"] = (heads * (nope + turned), compressed)
    else:
        found["q_proj.weight"] = (heads * (nope + turned), hidden)
    found["kv_a_proj_with_mqa.weight"], found["kv_a_layernorm.weight"] = (rank + turned, hidden), (rank,)
    found["kv_b_proj.weight"] = (heads * (nope + value), rank)
    found["o_proj.weight"] = (hidden, heads * value)
    if config.get("attention_bias"):
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            if f"{name}.weight" in found:
                found[f"{name}.bias"] = found[f"{name}.weight"][:1]
    return found


def _mlp(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    rows = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden)}
    if config["model_type"] == "phi3":
        rows = {"gate_up_proj": (2 * wide, hidden)}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in {**rows, "down_proj": (hidden, wide)}.items():
        found[f"{name}.weight"] = shape
        if config.get("mlp_bias"):
            found[f"{name}.bias"] = shape[:1]
    return found


def _sparse(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    if config["model_type"] == "gpt_oss":
        count, wide = config["num_local_experts"], config["intermediate_size"]
        return {
            "router.weight": (count, hidden),
            "router.bias": (count,),
            "experts.gate_up_proj": (count, hidden, 2 * wide),
            "experts.gate_up_proj_bias": (count, 2 * wide),
            "experts.down_proj": (count, wide, hidden),
            "experts.down_proj_bias": (count, hidden),
        }
    count = config.get("num_experts") or config["n_routed_experts"]
    wide, shared = config["moe_intermediate_size"], config.get("n_shared_experts", 0)
    found: dict[str, tuple[int, ...]] = {
        "gate.weight": (count, hidden),
        "experts.gate_up_proj": (count, 2 * wide, hidden),
        "experts.down_proj": (count, hidden, wide),
    }
    if "n_routed_experts" in config:
        found["gate.e_score_correction_bias"] = (count,)
    if shared:
        found["shared_experts.gate_proj.weight"] = found["shared_experts.up_proj.weight"] = (
            shared * wide,
            hidden,
        )
        found["shared_experts.down_proj.weight"] = (hidden, shared * wide)
    return found


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    if config["model_type"] == "qwen3_moe":
        return layer not in config["mlp_only_layers"]
    if "n_routed_experts" in config:
        return bool(layer >= config.get("first_k_dense_replace", 1))
    return config["model_type"] == "gpt_oss"


def tensor(
    name: str, shape: tuple[int, ...], seed: int, *, tied: bool, fp4: bool = False, family: str = ""
) -> NDArray[np.float32]:
    """One tensor. A tied embedding gets a small scale, or the model would only repeat its last token.

    `fp4`: experts `[E, in, out]` have values that mxfp4 holds exactly.
    """
    stream = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    unit = (2 * stream.random_sample(shape) - 1) * math.sqrt(3)  # mean 0, variance 1
    if name.endswith("bias"):
        value = 0.1 * unit
    elif name.endswith("sinks"):
        value = unit
    elif ".experts." in name and fp4:
        value = _fp4(unit, shape)
    elif name.endswith("A_log"):
        value = unit - 2  # memories of 2 to 50 tokens
    elif len(shape) == 1:
        value = 1 + 0.1 * unit
        if family.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 0.5 * value  # there is no other scale in its softmax
        if family.startswith(hybrids.STORED_LESS_ONE) and "norm" in name and "linear_attn" not in name:
            value = 0.1 * unit
    elif "embed_tokens" in name:
        value = (0.08 if tied else 0.5) * unit
    else:
        value = unit / math.sqrt(shape[-1])
    return value.astype(np.float32)


def build(config: dict[str, Any], seed: int) -> Tensors:
    """All tensors of the model of `config`, float32."""
    tied, fp4 = bool(config.get("tie_word_embeddings")), config["model_type"] == "gpt_oss"
    family = config["model_type"]
    return {
        name: tensor(name, shape, seed, tied=tied, fp4=fp4, family=family)
        for name, shape in shapes(config).items()
    }


def _fp4(unit: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """`unit` rounded to 4-bit floats times a power of two near the usual scale."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = np.abs(np.abs(unit)[..., None] * 2 - grid).argmin(axis=-1)
    return np.sign(unit) * grid[nearest] * 2.0 ** -(1 + round(math.log2(shape[1]) / 2))
