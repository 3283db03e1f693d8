"""The model families that the worker has, and what a config must say before anybody counts with it. Pure.

The worker's own table is `worker/models/__init__.py`, which the parent must not import; a test holds both equal.
"""

from typing import Any

# fmt: off
FAMILIES = (
    "llama", "mistral", "ministral3", "smollm3", "qwen2", "qwen3", "phi3", "qwen3_moe", "glm4_moe", "glm4_moe_lite",
    "gpt_oss", "deepseek_v3", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
)
# fmt: on

# `model_type`s that other servers are known to have, to send people somewhere instead of nowhere.
# fmt: off
_MLX_LM = frozenset({
    "apertus", "baichuan_m1", "bitnet", "cohere", "cohere2", "deepseek", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "falcon_h1", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma3n", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
    "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense", "internlm2",
    "internlm3", "lfm2", "llama4", "mamba", "mamba2", "minicpm", "minicpm3", "mixtral", "nemotron",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
_MLX_VLM = frozenset({
    "idefics2", "idefics3", "llava", "llava_next", "mistral3", "mllama", "paligemma", "pixtral", "qwen2_vl",
    "qwen2_5_vl", "qwen3_vl", "smolvlm",
})
# fmt: on

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LINEAR_SIZES = tuple(
    f"linear_{name}"
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
)
_MORE_SIZES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _LINEAR_SIZES),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR_SIZES + _EXPERT_SIZES),
    "qwen3_moe": _EXPERT_SIZES,
    "gpt_oss": _EXPERT_SIZES,
    "glm4_moe": _EXPERT_SIZES,
    "glm4_moe_lite": _EXPERT_SIZES + _LATENT_SIZES,
    "deepseek_v3": _EXPERT_SIZES + _LATENT_SIZES,
}
_MOST = 1 << 31  # far beyond any model: a layer count of 10^12 must not become a list
_MOST_LAYERS = 10_000


def family_fault(family: str) -> str:
    """Why a model of this `model_type` cannot be served, and what would; "" when it can."""
    if family in FAMILIES:
        return ""
    return (
        f"model family {family!r} is not supported, only {', '.join(FAMILIES)}; "
        f"convert a model of one of these, or use another server{_elsewhere(family)}"
    )


def extra_for(family: str) -> str:
    """The package that has the model classes of a family that is not ours: mlx-lm, mlx-vlm, or ""."""
    for package, known in (("mlx-lm", _MLX_LM), ("mlx-vlm", _MLX_VLM)):
        if family in known:
            return package
    return ""


def _elsewhere(family: str) -> str:
    package = extra_for(family)
    return f" ({package} serves it)" if package else ""


def config_fault(config: dict[str, Any]) -> str:
    """What makes a normalised config impossible to build a model from, naming the key; "" for nothing."""
    family = config.get("text_model_type", config.get("model_type"))
    for key in _SIZES + _MORE_SIZES.get(str(family), ()):
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        if problem := _not_a_count(config.get(key), most):
            return f"{key} {problem}"
    for key in ("max_position_embeddings", "sliding_window"):
        if key in config and (problem := _not_a_count(config[key], 1 << 50)):
            return f"{key} {problem}"
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        return (
            f"num_attention_heads {config['num_attention_heads']} is no multiple of "
            f"num_key_value_heads {config['num_key_value_heads']}"
        )
    if problem := _groups_fault(config):
        return problem
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return "layer_types is not a list of names"
    if config.get("enable_moe_block"):
        for key in _EXPERT_SIZES:
            if problem := _not_a_count(config.get(key), _MOST):
                return f"{key} {problem}"
    return _layers_fault(config)


def _layers_fault(config: dict[str, Any]) -> str:
    """What is wrong with sizes of single layers, or with layers that use the keys of others."""
    for layer, sizes in config.get("per_layer_config", {}).items():
        for key in ("num_key_value_heads", "head_dim"):
            if key in sizes and (problem := _not_a_count(sizes[key], _MOST)):
                return f"per_layer_config of layer {layer}: {key} {problem}"
    layers = config["num_hidden_layers"]
    for key, most in (("num_kv_shared_layers", layers - 1), ("hidden_size_per_layer_input", _MOST)):
        if config.get(key, 0) != 0 and (problem := _not_a_count(config[key], most)):
            return f"{key} {problem}"
    if config.get("per_layer_config") and len(config.get("layer_types", [])) != layers:
        return f"layer_types has {len(config.get('layer_types', []))} entries for {layers} layers"
    keys, values = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads", 1)
    if values % keys:
        return f"linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}"
    return ""


def _groups_fault(config: dict[str, Any]) -> str:
    """What makes it impossible to choose experts, or to choose them by groups."""
    experts = config.get("num_experts")
    if not isinstance(experts, int):
        return ""
    chosen = config.get("num_experts_per_tok", config.get("top_k_experts", 1))
    if isinstance(chosen, int) and chosen > experts:
        return f"num_experts_per_tok is {chosen}, but there are {experts} experts"
    groups = config.get("n_group", 1)
    if problem := _not_a_count(groups, _MOST):
        return f"n_group {problem}"
    if groups > 1:
        if problem := _not_a_count(config.get("topk_group"), groups):
            return f"topk_group {problem}"
        if experts % groups or experts < 2 * groups:
            return f"{experts} experts do not divide into {groups} groups of two or more"
        if chosen > experts // groups * config["topk_group"]:
            return f"num_experts_per_tok is {chosen}, more than {config['topk_group']} groups of experts have"
    return ""


def _not_a_count(value: Any, most: int) -> str:
    if value is None:
        return "is missing"
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        shown = repr(value)
        return f"is {shown if len(shown) < 40 else shown[:36] + '...'}, not a number from 1 to {most}"
    return ""
