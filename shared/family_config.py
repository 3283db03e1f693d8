"""What transformers assumes where the config of a family says nothing, and what families spell in their own way.

Formulas and numbers: transformers 5.24, `configuration_<family>.py`. `shared.model_config` is the only caller.
"""

from collections.abc import Callable, Mapping
from typing import Any

Config = dict[str, Any]

_GEMMA3: Config = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA4: Config = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
}
_GEMMA4_UNIFIED: Config = {
    **_GEMMA4,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_QWEN3_5: Config = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5_MOE: Config = {
    **_QWEN3_5,
    "hidden_size": 2048,
    "intermediate_size": None,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

_BERT: Config = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA: Config = {**_BERT, "vocab_size": 50265, "pad_token_id": 1}
_XLM_ROBERTA: Config = {**_ROBERTA, "vocab_size": 30522}

DEFAULTS: Mapping[str, Config] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _XLM_ROBERTA,
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "ministral3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3": {"head_dim": 128},
    "smollm3": {"rope_theta": 2e6, "num_key_value_heads": 4},
    "glm4_moe": {"partial_rotary_factor": 0.5, "n_shared_experts": 1},
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
    },
    "glm4_moe_lite": {"routed_scaling_factor": 1.8, "n_shared_experts": 1},
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _GEMMA4_UNIFIED),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5_MOE),
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""By `model_type`, of the text model where another one is around it. An explicit null means "none"."""

_MOST_LAYERS = 10_000  # a layer count of 10^12 must not become a list


def complete(config: Config, family: str) -> None:
    """Spell out in `config` what only this family says its own way. Raises ValueError for what has no meaning."""
    if family in _COMPLETE:
        _COMPLETE[family](config)


def _gemma3(config: Config) -> None:
    """Two ropes, of which the old spelling has one flat; every n-th layer attends to all tokens."""
    _activation(config)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    _layer_types(config, pattern, "sliding_attention")
    rope = config.pop("rope_scaling", None) or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling is {rope!r}, not an object")
    is_flat = not any(isinstance(value, dict) for value in rope.values())
    full, sliding = (rope, {}) if is_flat else (rope.get("full_attention"), rope.get("sliding_attention"))
    theta, near = config.pop("rope_theta", 1000000.0), config.pop("rope_local_base_freq", 10000.0)
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": theta, **(full or {})},
        "sliding_attention": {"rope_theta": near, **(sliding or {})},
    }


def _gemma4(config: Config) -> None:
    """Sizes of single layers; transformers 4 and MLX have one size for all layers that attend to all tokens."""
    _activation(config)
    _layer_types(config, 6, "sliding_attention")
    kinds = config.get("layer_types")
    kinds = [*kinds[:-1], "full_attention"] if isinstance(kinds, list) and kinds else []
    if kinds:
        config["layer_types"] = kinds
    if "top_k_experts" in config:
        config["num_experts_per_tok"] = config.pop("top_k_experts")
    wide: Config = {"head_dim": config.pop("global_head_dim", 512)}
    heads = config.pop("num_global_key_value_heads", None)
    if heads is not None and config.get("attention_k_eq_v"):
        wide["num_key_value_heads"] = heads
    given = config.get("per_layer_config")
    if given is None:
        given = {n: wide for n, kind in enumerate(kinds) if kind == "full_attention"}
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise ValueError(f"per_layer_config is {given!r}, not an object of objects")
    if not all(str(key).isdigit() for key in given):
        raise ValueError(f"per_layer_config has the keys {', '.join(map(str, given))}, not numbers of layers")
    config["per_layer_config"] = {str(int(key)): one for key, one in given.items()}


def _qwen3_5(config: Config) -> None:
    """Every n-th layer is one of attention. Without a dense MLP only the shared expert says how wide one is."""
    _layer_types(config, config.pop("full_attention_interval", 4), "linear_attention")
    if "shared_expert_intermediate_size" in config:
        config.setdefault("intermediate_size", config["shared_expert_intermediate_size"])


def _activation(config: Config) -> None:
    if "hidden_activation" in config:
        config["hidden_act"] = config.pop("hidden_activation")


def _layer_types(config: Config, every: Any, other: str) -> None:
    """`layer_types` where there are none: one layer in `every` is full attention, the rest is `other`."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") is not None or not isinstance(count, int) or count > _MOST_LAYERS:
        return
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"one layer in {every!r} is to be of full attention")
    config["layer_types"] = [other if (n + 1) % every else "full_attention" for n in range(count)]


_COMPLETE: Mapping[str, Callable[[Config], None]] = {
    **dict.fromkeys(("gemma3", "gemma3_text"), _gemma3),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _gemma4),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen3_5),
}
