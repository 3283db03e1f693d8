"""A llama-family GGUF as a Hugging Face model: tensor names, row order and config. Pure.

Source: ggml's `docs/gguf.md` for the keys, llama.cpp's `convert_hf_to_gguf.py` for what it changes and this
undoes. Raises `GgufError` for what cannot be carried over exactly.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from worker.jobs.gguf import Gguf, GgufError, Unsupported

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"

_FIXED = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
# Settings of relatives that llama.cpp runs under this architecture and the llama graph does not have.
_FOREIGN = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale", "expert_count")
# What Meta published: (factor, low_freq_factor, high_freq_factor, original length).
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in _FIXED and leaf == "weight":
        return f"{_FIXED[module]}.weight"
    block = _BLOCK.fullmatch(name)
    if not block or block[2] not in _PARTS:
        raise Unsupported(f"tensor {name} is not part of a llama model")
    return f"model.layers.{block[1]}.{_PARTS[block[2]]}.{block[3]}"


def row_order(name: str, rows: int, num_heads: int, num_kv_heads: int) -> list[int] | None:
    """Which row of the file each row of the tensor is; None where they are in place.

    llama.cpp pairs neighbouring values in its rotary embedding, so its converter interleaves the two halves
    of each head in attn_q and attn_k.
    """
    heads = num_heads if ".attn_q." in name else num_kv_heads if ".attn_k." in name else 0
    if not heads:
        return None
    half = rows // heads // 2
    return [head * 2 * half + 2 * i + side for head in range(heads) for side in range(2) for i in range(half)]


def config_of(gguf: Gguf, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The `config.json` (without dtype and quantization). `rope_factors`: the values of rope_freqs.weight."""
    get = _reader(gguf.metadata)
    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise GgufError(
            f"llama.embedding_length {hidden} and llama.attention.head_count {heads} make no model"
        )
    for key in _FOREIGN:
        if gguf.metadata.get(f"{ARCHITECTURE}.{key}"):
            raise Unsupported(
                f"metadata llama.{key} = {gguf.metadata[f'llama.{key}']} is not of a plain llama model"
            )
    head_dim = get("attention.key_length", int, hidden // heads)
    if (
        get("attention.value_length", int, head_dim) != head_dim
        or get("rope.dimension_count", int, head_dim) != head_dim
    ):
        raise Unsupported(
            "keys, values and rotated parts of a head differ in length, which a llama model cannot have"
        )
    names = gguf.tensors.keys()
    vocab = gguf.tensors.get("token_embd.weight")
    if vocab is None:
        raise GgufError("no tensor token_embd.weight; this is not a whole model")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length", int),
        "num_hidden_layers": get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length", int),
        # stored as float32: 1e-5 comes as 9.999999747378752e-06
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon', float):.6g}"),
        "vocab_size": vocab.shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": any(".attn_q.bias" in name for name in names),
        "mlp_bias": any(".ffn_up.bias" in name for name in names),
        "use_cache": True,
    }
    rope = rope_parameters(gguf.metadata, config, rope_factors)
    config["rope_parameters"] = rope
    config["rope_theta"] = rope["rope_theta"]  # the same in the spelling of transformers 4
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    for key in ("bos", "eos", "padding"):
        token = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config["pad_token_id" if key == "padding" else f"{key}_token_id"] = token
    return config


def rope_parameters(
    metadata: Mapping[str, Any], config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    """`rope_parameters` of the metadata, or of the per-frequency factors that llama 3 files carry."""
    get = _reader(metadata)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(f"{get('rope.freq_base', float, 10000.0):.9g}"),
    }
    kind = get("rope.scaling.type", str, "none")
    factor = get("rope.scaling.factor", float, 0.0)
    if "llama.rope.scale_linear" in metadata and kind == "none":  # before scaling had a type
        kind, factor = "linear", get("rope.scale_linear", float)
    original = get("rope.scaling.original_context_length", int, config["max_position_embeddings"])
    if factors is not None and any(abs(each - 1) > 1e-6 for each in factors):
        if kind != "none":
            raise Unsupported(f"{ROPE_FREQS} together with rope scaling {kind!r}")
        return {**rope, **_from_factors(factors, rope["rope_theta"], original)}
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"rope scaling {kind!r} cannot be carried over; linear and yarn can")
    if factor <= 0:
        raise GgufError(f"rope scaling {kind!r} with the factor {factor}")
    rope.update(rope_type=kind, factor=factor)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if f"llama.rope.scaling.yarn_{key}" in metadata:
                rope[key] = get(f"rope.scaling.yarn_{key}", float)
        attention = get("rope.scaling.attn_factor", float, 1.0)
        if attention != 1.0:  # llama.cpp multiplies it with the default, transformers replaces the default
            rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return rope


def llama3_factors(
    count: int, theta: float, factor: float, low: float, high: float, original: int
) -> list[float]:
    """What llama.cpp's converter writes to rope_freqs.weight for these llama3 parameters."""
    found = []
    for i in range(count):
        wavelength = 2 * math.pi * theta ** (i / count)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _from_factors(factors: Sequence[float], theta: float, original: int) -> dict[str, Any]:
    """llama3's parameters if they are among the published ones, else the factors as they are (longrope)."""
    for factor, low, high, length in _LLAMA3:
        expected = llama3_factors(len(factors), theta, factor, low, high, length)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    exact = [float(each) for each in factors]
    return {
        "rope_type": "longrope",
        "short_factor": exact,
        "long_factor": exact,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": original,
    }


class _Missing:
    """No default."""


def _reader(metadata: Mapping[str, Any]) -> Any:
    """`get(key, type, default)` below `llama.`; per-layer lists must be all the same."""

    def get(key: str, kind: type, default: Any = _Missing) -> Any:
        found = metadata.get(f"{ARCHITECTURE}.{key}", default)
        if found is _Missing:
            raise GgufError(f"metadata llama.{key} is missing")
        if isinstance(found, list):
            if not found or any(each != found[0] for each in found):
                raise Unsupported(f"metadata llama.{key} differs from layer to layer")
            found = found[0]
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        wrong_type = not isinstance(found, kind) or isinstance(found, bool)
        if wrong_type or (isinstance(found, float) and not math.isfinite(found)):
            raise GgufError(f"metadata llama.{key} is {found!r}")
        return found

    return get
