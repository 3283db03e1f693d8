"""One spelling for every `config.json`.

Two dialects are in the wild: transformers 5 (`rope_parameters`, `dtype`) and everything before it
(`rope_theta` + `rope_scaling`, `torch_dtype`); multimodal models nest the text model in `text_config`. The
rules are those of transformers 5.24 (`modeling_rope_utils.RotaryEmbeddingConfigMixin`). Nobody else in the
project looks at a raw config.
"""

from typing import Any

from shared.family_config import DEFAULTS, complete

Config = dict[str, Any]

# Families that have a `sliding_window` in their config and use it only where `use_sliding_window` is true.
_WINDOW_ON_REQUEST = frozenset({"qwen2", "qwen3", "qwen3_moe", "smollm3"})
_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_NEEDS_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})


def normalise(raw: Config) -> Config:
    """A flat config in one spelling; nulls are dropped. Raises ValueError saying what cannot be understood.

    Always there: `model_type`. Where the source says enough: `head_dim`, `num_key_value_heads`,
    `rope_parameters` (with `rope_type` and `rope_theta`), `dtype`, `eos_token_id` (a list), `quantization`,
    `num_experts` (of those that a router chooses from).
    """
    text = raw.get("text_config")
    inner: Config = text if isinstance(text, dict) else {}
    config: Config = {**raw, **inner}
    config.pop("text_config", None)
    config["model_type"] = raw.get("model_type")
    family = inner.get("model_type", raw.get("model_type"))
    if inner:
        config["text_model_type"] = family
    config = {**DEFAULTS.get(str(family), {}), **config}
    quantization = _quantization(raw, inner)
    config = {key: value for key, value in config.items() if value is not None}
    config.pop("quantization_config", None)
    config.pop("quantization", None)
    if quantization:
        config["quantization"] = quantization
    if raw.get("eos_token_id") is not None:  # of a model around a text model, which knows the end of a turn
        config["eos_token_id"] = raw["eos_token_id"]
    complete(config, str(family))

    dtype = config.pop("torch_dtype", None)
    config.setdefault("dtype", dtype)
    if isinstance(config["dtype"], str):
        config["dtype"] = config["dtype"].removeprefix("torch.")
    else:
        del config["dtype"]
    config["eos_token_id"] = token_ids(config.get("eos_token_id"))
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        config.setdefault("num_key_value_heads", heads)
        hidden = config.get("hidden_size")
        if isinstance(hidden, int):
            config.setdefault("head_dim", hidden // heads)
    for name in ("num_local_experts", "n_routed_experts"):
        if name in config:
            config["num_experts"] = config.pop(name)
    if family == "gpt_oss" and "intermediate_size" in config:
        config.setdefault("moe_intermediate_size", config["intermediate_size"])
    if family in _WINDOW_ON_REQUEST and not config.get("use_sliding_window"):
        config.pop("sliding_window", None)
    config["rope_parameters"] = _rope_parameters(config)
    for spent in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        config.pop(spent, None)
    return config


def token_ids(value: Any) -> list[int]:
    """`2`, `[2, 7]` or nothing, as a list. Raises ValueError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(one, int) or isinstance(one, bool) for one in ids):
        raise ValueError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return list(ids)


def _quantization(raw: Config, inner: Config) -> Config:
    """MLX's quantization dict, wherever it stands; {} without one. ValueError for another tool's scheme."""
    for place in (raw, inner):
        for key in ("quantization", "quantization_config"):
            found = place.get(key)
            if isinstance(found, dict) and "bits" in found and "quant_method" not in found:
                return found
    for place in (raw, inner):
        found = place.get("quantization_config")
        if isinstance(found, dict) and "quant_method" in found:
            if found["quant_method"] == "mxfp4" and raw.get("model_type") == "gpt_oss":
                return {"mode": "mxfp4", "bits": 4, "group_size": 32}
            raise ValueError(
                f"the weights are quantized with {found['quant_method']!r} in its own layout, which this server "
                "cannot read; take an MLX version of the model, or an unquantized one"
            )
    return {}


def _rope_parameters(config: Config) -> Config:
    """`rope_parameters` of transformers 5 from either dialect: flat, or one object per attention type."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling is {rope!r}, not an object")
    nested = {key: rope[key] for key in _ATTENTION_TYPES if isinstance(rope.get(key), dict)}
    if nested:
        return {key: _rope_of(config, value) for key, value in nested.items()}
    return _rope_of(config, rope)


def _rope_of(config: Config, given: Config) -> Config:
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if rope["rope_type"] in _NEEDS_ORIGINAL:
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        elif "max_position_embeddings" in config:
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope
