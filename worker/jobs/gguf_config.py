"""The config of a GGUF file as Hugging Face's: what all families have, and rotary embeddings. Pure.

Source: ggml's `docs/gguf.md` for the keys, llama.cpp's converter for what it writes there. Raises `GgufError` for
what cannot be carried over exactly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from worker.jobs.gguf import Gguf, GgufError, Unsupported

Config = dict[str, Any]

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

# What Meta published: (factor, low_freq_factor, high_freq_factor, original length).
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


class _Missing:
    """No default."""


class Facts:
    """The header of a file, asked for keys below its architecture. `factors`: tables of rotary factors, by name."""

    def __init__(self, gguf: Gguf, factors: Mapping[str, Sequence[float]]) -> None:
        self.metadata, self.tensors, self.factors = gguf.metadata, gguf.tensors, factors
        self.architecture = str(gguf.metadata.get("general.architecture"))

    def get(self, key: str, kind: type, default: Any = _Missing) -> Any:
        """A value of this type; per-layer lists must be all the same."""
        name = f"{self.architecture}.{key}"
        found = self.metadata.get(name, default)
        if found is _Missing:
            raise GgufError(f"metadata {name} is missing")
        if isinstance(found, list):
            if not found or any(each != found[0] for each in found):
                raise Unsupported(f"metadata {name} differs from layer to layer")
            found = found[0]
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        wrong_type = not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool)
        if wrong_type or (isinstance(found, float) and not math.isfinite(found)):
            raise GgufError(f"metadata {name} is {found!r}")
        return found

    def number(self, key: str, default: Any = _Missing, digits: int = 6) -> float:
        """A float32 as it was written: 1e-5 comes as 9.999999747378752e-06."""
        return float(f"{self.get(key, float, default):.{digits}g}")

    def has(self, part: str) -> bool:
        """Whether there is a tensor of a layer with this in its name."""
        return any(part in name for name in self.tensors)


def base_config(facts: Facts) -> Config:
    """What every family has, without `model_type` and rope. Raises `GgufError`."""
    hidden, heads = facts.get("embedding_length", int), facts.get("attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise GgufError(
            f"{facts.architecture}.embedding_length {hidden} and {facts.architecture}.attention.head_count {heads} "
            "make no model"
        )
    vocab = facts.tensors.get("token_embd.weight")
    if vocab is None:
        raise GgufError("no tensor token_embd.weight; this is not a whole model")
    config: Config = {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": facts.get("feed_forward_length", int, 0),
        "num_hidden_layers": facts.get("block_count", int) - facts.get("nextn_predict_layers", int, 0),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", int, heads),
        "head_dim": facts.get("attention.key_length", int, hidden // heads),
        "max_position_embeddings": facts.get("context_length", int),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab.shape[0],
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "use_cache": True,
    }
    for key in ("bos", "eos", "padding"):
        token = facts.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config["pad_token_id" if key == "padding" else f"{key}_token_id"] = token
    return config


def refuse_foreign(facts: Facts, *keys: str) -> None:
    """Refuse settings of relatives that run under this architecture and have another graph."""
    for key in keys:
        name = f"{facts.architecture}.{key}"
        if facts.metadata.get(name):
            raise Unsupported(
                f"metadata {name} = {facts.metadata[name]} is not of a plain {facts.architecture} model"
            )


def require_whole_heads(facts: Facts, config: Config, *, rotated: bool = True) -> None:
    """Refuse values of another length than keys and, with `rotated`, heads that are turned in part only."""
    dim = config["head_dim"]
    if facts.get("attention.value_length", int, dim) != dim or (
        rotated and facts.get("rope.dimension_count", int, dim) != dim
    ):
        raise Unsupported(
            f"keys, values and rotated parts of a head differ in length, which a {facts.architecture} model cannot "
            "have"
        )


def with_rope(config: Config, rope: Config) -> Config:
    """The config with its rope, in the spellings of transformers 5 and 4."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        **config,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def rope_parameters(facts: Facts, longest: int) -> Config:
    """`rope_parameters` of the metadata, or of the per-frequency factors that llama 3 files carry.

    `longest`: the length that the model is for.
    """
    rope: Config = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0, 9)}
    kind = facts.get("rope.scaling.type", str, "none")
    factor = facts.get("rope.scaling.factor", float, 0.0)
    if (
        f"{facts.architecture}.rope.scale_linear" in facts.metadata and kind == "none"
    ):  # before scaling had a type
        kind, factor = "linear", facts.get("rope.scale_linear", float)
    original = facts.get("rope.scaling.original_context_length", int, longest)
    factors = facts.factors.get(ROPE_FREQS)
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
            if f"{facts.architecture}.rope.scaling.yarn_{key}" in facts.metadata:
                rope[key] = facts.get(f"rope.scaling.yarn_{key}", float)
        attention = facts.get("rope.scaling.attn_factor", float, 1.0)
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


def _from_factors(factors: Sequence[float], theta: float, original: int) -> Config:
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
