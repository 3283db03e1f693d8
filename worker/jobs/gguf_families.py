"""The model families of GGUF files: which tensor is which, and the config of each. Pure; one table a family.

Source: llama.cpp's `conversion/*.py` for names and for what it changes on the way, which is undone here. Names on our
side are Hugging Face's, those of stacks of experts and of heads MLX's.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from worker.jobs.gguf import GgufError, Unsupported
from worker.jobs.gguf_config import (
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    Config,
    Facts,
    base_config,
    refuse_foreign,
    require_whole_heads,
    rope_parameters,
    with_rope,
)

_FIXED = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TABLES = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)(?:\.(weight|bias))?")

Names = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """`parts`: of a layer, by their names in the file, with the leaf where ours has another. `turned`: rows of queries
    and keys are in the order of another rotation. `norm_shift`: what the file has added to the weights of norms.
    """

    model_type: str
    class_name: str
    parts: Names
    config: Callable[[Facts], Config]
    turned: bool = False
    norm_shift: float = 0.0

    def hf_name(self, name: str, layers: int) -> str:
        """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; "" for what is no part of the graph.

        Raises `Unsupported`.
        """
        module, _, leaf = name.rpartition(".")
        if module in _FIXED and leaf == "weight":
            return f"{_FIXED[module]}.weight"
        block = _BLOCK.match(name)
        if name in _TABLES or (
            block and int(block[1]) >= layers
        ):  # layers that guess further ahead come last
            return ""
        if block and block.end() == len(name):
            whole = f"{block[2]}.{block[3]}"
            if whole in self.parts:
                return f"model.layers.{block[1]}.{self.parts[whole]}"
            if block[2] in self.parts:
                return f"model.layers.{block[1]}.{self.parts[block[2]]}.{block[3]}"
        raise Unsupported(f"tensor {name} is not part of a {self.model_type} model")

    def shift(self, name: str) -> float:
        """What has to be taken off the values of this tensor."""
        return self.norm_shift if name.endswith("norm.weight") else 0.0


def row_order(name: str, rows: int, num_heads: int, num_kv_heads: int) -> list[int] | None:
    """Which row of the file each row of the tensor is; None where they are in place.

    Of families that are `turned`: llama.cpp pairs neighbouring values in its rotary embedding, so its converter
    interleaves the two halves of each head in attn_q and attn_k.
    """
    heads = num_heads if ".attn_q." in name else num_kv_heads if ".attn_k." in name else 0
    if not heads:
        return None
    half = rows // heads // 2
    return [head * 2 * half + 2 * i + side for head in range(heads) for side in range(2) for i in range(half)]


# ---------------------------------------------------------------- parts

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {**_ATTENTION, **_MLP}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_ROUTED = {
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_PHI3 = {**_DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GEMMA3 = {
    **_DENSE,
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GLM4_MOE = {
    **_DENSE,
    **_HEAD_NORMS,
    **_ROUTED,
    "post_attention_norm": "post_attention_layernorm",
}
_LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_output": "self_attn.o_proj",
}

# ---------------------------------------------------------------- configs

# Settings of relatives that llama.cpp runs under this architecture and the llama graph does not have.
_FOREIGN = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale", "expert_count")


def _llama(facts: Facts) -> Config:
    refuse_foreign(facts, *_FOREIGN)
    config = base_config(facts)
    require_whole_heads(facts, config)
    config |= {"attention_bias": facts.has(".attn_q.bias"), "mlp_bias": facts.has(".ffn_up.bias")}
    return with_rope(config, rope_parameters(facts, config["max_position_embeddings"]))


def _smollm3(facts: Facts) -> Config:
    """Every fourth layer does not turn its queries and keys: llama.cpp knows it, and does not write it down."""
    return {**_llama(facts), "no_rope_layer_interval": 4}


def _ministral3(facts: Facts) -> Config:
    config = _llama(facts)
    rope = {"mscale": 1.0, **config["rope_parameters"]}
    if rope["rope_type"] != "yarn":
        raise Unsupported(f"a ministral3 model with rope scaling {rope['rope_type']!r}; it has yarn")
    rope["mscale_all_dim"] = facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope["llama_4_scaling_beta"] = facts.number("attention.temperature_scale", 0.0)
    return with_rope(config, rope)


def _plain(facts: Facts) -> Config:
    config = base_config(facts)
    require_whole_heads(facts, config)
    return with_rope(config, rope_parameters(facts, config["max_position_embeddings"]))


def _qwen3(facts: Facts) -> Config:
    return {**_plain(facts), "attention_bias": facts.has(".attn_q.bias")}


def _qwen3_moe(facts: Facts) -> Config:
    """llama.cpp norms the chosen experts' weights to one always."""
    return {
        **_qwen3(facts),
        "num_experts": facts.get("expert_count", int),
        "num_experts_per_tok": facts.get("expert_used_count", int),
        "moe_intermediate_size": facts.get("expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(facts: Facts) -> Config:
    config = base_config(facts)
    require_whole_heads(facts, config, rotated=False)
    theta = facts.number("rope.freq_base", 10000.0, 9)
    longest = config["max_position_embeddings"]
    original = facts.get("rope.scaling.original_context_length", int, longest)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    turned = facts.get("rope.dimension_count", int, config["head_dim"])
    if ROPE_LONG in facts.factors and ROPE_SHORT in facts.factors:
        scale = longest / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        rope |= {
            "rope_type": "longrope",
            "short_factor": [float(each) for each in facts.factors[ROPE_SHORT]],
            "long_factor": [float(each) for each in facts.factors[ROPE_LONG]],
            "original_max_position_embeddings": original,
            "attention_factor": facts.get("rope.scaling.attn_factor", float, usual),
        }
    if turned != config["head_dim"]:
        rope["partial_rotary_factor"] = turned / config["head_dim"]
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    window = facts.get("attention.sliding_window", int, 0)
    config |= {"original_max_position_embeddings": original, "sliding_window": window or None}
    return with_rope(config, rope)


def _gemma3(facts: Facts) -> Config:
    """Five layers slide, one does not; the softmax scale of the 27B model goes by the width of the model."""
    config = base_config(facts)
    require_whole_heads(facts, config)
    refuse_foreign(facts, "attn_logit_softcapping")
    pattern = facts.get("attention.sliding_window_pattern", int, 6)
    window = facts.get("attention.sliding_window", int)
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    full = rope_parameters(facts, config["max_position_embeddings"])
    near = facts.number("rope.freq_base_swa", 10000.0, 9)
    del config["hidden_act"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": facts.get("final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
    }


def _gpt_oss(facts: Facts) -> Config:
    config = base_config(facts)
    require_whole_heads(facts, config)
    rope = rope_parameters(facts, config["max_position_embeddings"])
    if rope["rope_type"] == "yarn":
        rope = {**rope, "truncate": False, "beta_fast": rope.get("beta_fast", 32.0)}
        rope.setdefault("beta_slow", 1.0)
    return with_rope(
        {
            **config,
            "intermediate_size": facts.get("expert_feed_forward_length", int),
            "num_local_experts": facts.get("expert_count", int),
            "num_experts_per_tok": facts.get("expert_used_count", int),
            "sliding_window": facts.get("attention.sliding_window", int),
            "attention_bias": True,
            "swiglu_limit": 7.0,
        },
        rope,
    )


def _routed(facts: Facts) -> Config:
    """What models have that route as DeepSeek-V3 does."""
    gating = facts.get("expert_gating_func", int, 2)
    if gating != 2:
        raise Unsupported(f"experts chosen by function {gating}; sigmoid (2) can be carried over")
    return {
        "n_routed_experts": facts.get("expert_count", int),
        "num_experts_per_tok": facts.get("expert_used_count", int),
        "moe_intermediate_size": facts.get("expert_feed_forward_length", int),
        "n_shared_experts": facts.get("expert_shared_count", int, 0),
        "first_k_dense_replace": facts.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.get("expert_weights_norm", bool, False),
        "n_group": facts.get("expert_group_count", int, 1),
        "topk_group": facts.get("expert_group_used_count", int, 1),
    }


def _glm4_moe(facts: Facts) -> Config:
    config = base_config(facts)
    require_whole_heads(facts, config, rotated=False)
    share = facts.get("rope.dimension_count", int, config["head_dim"] // 2) / config["head_dim"]
    rope = {
        **rope_parameters(facts, config["max_position_embeddings"]),
        "partial_rotary_factor": share,
    }
    return with_rope(
        {
            **config,
            **_routed(facts),
            "partial_rotary_factor": share,
            "attention_bias": facts.has(".attn_q.bias"),
            "use_qk_norm": facts.has(".attn_q_norm."),
        },
        rope,
    )


def _deepseek(facts: Facts) -> Config:
    config = base_config(facts)
    turned = facts.get("rope.dimension_count", int)
    rank = facts.get("attention.kv_lora_rank", int)
    nope = facts.get("attention.key_length_mla", int, facts.get("attention.key_length", int)) - turned
    value = facts.get("attention.value_length_mla", int, facts.get("attention.value_length", int))
    if facts.has(".attn_k_b.") and f"{facts.architecture}.attention.key_length_mla" not in facts.metadata:
        raise GgufError(f"metadata {facts.architecture}.attention.key_length_mla is missing")
    rope = rope_parameters(facts, config["max_position_embeddings"])
    if rope["rope_type"] == "yarn":
        wide = round(facts.get("rope.scaling.yarn_log_multiplier", float, 0.0) * 10, 6)
        rope |= {"mscale": wide or 1.0, "mscale_all_dim": wide}
        rope.pop("attention_factor", None)
    config |= {
        **_routed(facts),
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": rank,
        "q_lora_rank": facts.get("attention.q_lora_rank", int, 0) or None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "head_dim": turned,
        "attention_bias": False,
        "rope_interleave": True,
    }
    return with_rope(config, rope)


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", _DENSE, _llama, turned=True),
    "mistral3": Family("ministral3", "Ministral3ForCausalLM", _DENSE, _ministral3, turned=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", _DENSE, _smollm3, turned=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _DENSE, _plain),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**_DENSE, **_HEAD_NORMS}, _qwen3),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {**_DENSE, **_HEAD_NORMS, **_EXPERTS}, _qwen3_moe),
    "phi3": Family("phi3", "Phi3ForCausalLM", _PHI3, _phi3),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3, norm_shift=1.0),
    "gpt-oss": Family("gpt_oss", "GptOssForCausalLM", _GPT_OSS, _gpt_oss),
    "glm4moe": Family("glm4_moe", "Glm4MoeForCausalLM", _GLM4_MOE, _glm4_moe),
    "deepseek2": Family("deepseek_v3", "DeepseekV3ForCausalLM", {**_LATENT, **_MLP, **_ROUTED}, _deepseek),
}
"""`general.architecture` to the family that it becomes."""


def config_of(family: Family, facts: Facts) -> Config:
    """The `config.json`, without dtype and quantization. Raises `GgufError`."""
    return {"architectures": [family.class_name], "model_type": family.model_type, **family.config(facts)}
