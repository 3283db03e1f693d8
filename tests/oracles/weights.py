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

Tensors = dict[str, NDArray[np.float32]]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama-like model's tensors, as transformers saves them."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        matrices = {
            f"{attention}.q_proj": (heads * dim, hidden),
            f"{attention}.k_proj": (kv_heads * dim, hidden),
            f"{attention}.v_proj": (kv_heads * dim, hidden),
            f"{attention}.o_proj": (hidden, heads * dim),
            f"{mlp}.gate_proj": (wide, hidden),
            f"{mlp}.up_proj": (wide, hidden),
            f"{mlp}.down_proj": (hidden, wide),
        }
        for module, shape in matrices.items():
            found[f"{module}.weight"] = shape
            biased = config.get("attention_bias") if module.startswith(attention) else config.get("mlp_bias")
            if biased:
                found[f"{module}.bias"] = (shape[0],)
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def tensor(name: str, shape: tuple[int, ...], seed: int, *, tied: bool) -> NDArray[np.float32]:
    """One tensor. A tied embedding gets a small scale, or the model would only repeat its last token."""
    stream = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    unit = (2 * stream.random_sample(shape) - 1) * math.sqrt(3)  # mean 0, variance 1
    if name.endswith(".bias"):
        value = 0.1 * unit
    elif len(shape) == 1:
        value = 1 + 0.1 * unit
    elif "embed_tokens" in name:
        value = (0.08 if tied else 0.5) * unit
    else:
        value = unit / math.sqrt(shape[1])
    return value.astype(np.float32)


def build(config: dict[str, Any], seed: int) -> Tensors:
    """All tensors of the model of `config`, float32."""
    tied = bool(config.get("tie_word_embeddings"))
    return {name: tensor(name, shape, seed, tied=tied) for name, shape in shapes(config).items()}
