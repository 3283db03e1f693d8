"""The model families that the worker has, and what a config must say before anybody counts with it. Pure.

The worker's own table is `worker/models/__init__.py`, which the parent must not import; a test holds both equal.
"""

from typing import Any, Literal

from shared.encoders import ENCODERS
from shared.providers import INSTALL, MLX_VLM_FAMILIES, mlx_lm_has, mlx_lm_version

Support = Literal["native", "extra", "unsupported"]

# fmt: off
FAMILIES = (
    "llama", "mistral", "ministral3", "smollm3", "qwen2", "qwen3", "phi3", "qwen3_moe", "glm4_moe", "glm4_moe_lite",
    "gpt_oss", "deepseek_v3", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
)
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
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length"),
}
_MOST = 1 << 31  # far beyond any model: a layer count of 10^12 must not become a list
_MOST_LAYERS = 10_000


def support_of(family: str) -> Support:
    """Whether models of this `model_type` are served by our own graphs, by the extra mlx-lm, or not at all."""
    if family in FAMILIES or family in ENCODERS:
        return "native"
    return "extra" if mlx_lm_has(family) else "unsupported"


def family_fault(family: str) -> str:
    """Why a model of this `model_type` cannot be served by this interpreter, and what would; "" when it can."""
    support = support_of(family)
    if support == "native" or (support == "extra" and mlx_lm_version()):
        return ""
    if support == "extra":
        return f"model family {family!r} is not a native one; the extra mlx-lm serves it: {INSTALL}"
    also = (
        "mlx-vlm has it"
        if family in MLX_VLM_FAMILIES
        else "choose a model of one of these, or another server"
    )
    ours = ", ".join((*FAMILIES, *ENCODERS))
    return f"model family {family!r} is not supported: native are {ours}, and mlx-lm is not known to have it; {also}"


def foreign_config(config: dict[str, Any]) -> dict[str, Any]:
    """The normalised config of a family that is not ours, as far as one can count with it; {} where one cannot.

    All layers keep all tokens then, whatever the config says of windows and states: no model takes more.
    """
    counted = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    for ours, theirs in _OTHER_NAMES.items():
        found = next((config[name] for name in theirs if name in config), None)
        if ours not in counted and found is not None:
            counted[ours] = found
    heads, hidden = counted.get("num_attention_heads"), counted.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        counted.setdefault("num_key_value_heads", heads)
        counted.setdefault("head_dim", hidden // heads)
        counted.setdefault("intermediate_size", 4 * hidden)
    return {} if config_fault(counted) else counted


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
