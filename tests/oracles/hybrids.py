"""Tensors of families whose layers differ: Gemma 3 and 4, Qwen 3.5. Names and shapes as in transformers."""

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

STORED_LESS_ONE = ("gemma3", "qwen3_5")  # their norms, except that inside a gated delta net


def shapes(config: Config) -> Shapes:
    """Tensors of a whole model of one of these families."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    of_layer = _qwen3_5 if config["model_type"].startswith("qwen3_5") else _gemma
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer(config, i).items()}
    if width := config.get("hidden_size_per_layer_input"):
        wide = config["num_hidden_layers"] * width
        found["model.embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], wide)
        found["model.per_layer_model_projection.weight"] = (wide, hidden)
        found["model.per_layer_projection_norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def is_hybrid(config: Config) -> bool:
    """Whether this file knows the family."""
    return config["model_type"].startswith(("gemma3", "gemma4", "qwen3_5"))


def _gemma(config: Config, layer: int) -> Shapes:
    hidden, is_four = config["hidden_size"], config["model_type"].startswith("gemma4")
    here = {**config, **config.get("per_layer_config", {}).get(str(layer), {})}
    shares = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    values_are_keys = config.get("attention_k_eq_v") and config["layer_types"][layer] == "full_attention"
    found = _attention(here, query_rows=1)
    if values_are_keys:
        del found["self_attn.v_proj.weight"]
    if shares:
        found = {name: shape for name, shape in found.items() if "q_" in name or "o_" in name}
    sides = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found |= {f"{side}_layernorm.weight": (hidden,) for side in sides}
    found |= _mlp("mlp", hidden, config["intermediate_size"] * (1 + shares))
    if not is_four:
        return found
    found["layer_scalar"] = (1,)
    if width := config.get("hidden_size_per_layer_input"):
        found["per_layer_input_gate.weight"] = (width, hidden)
        found["per_layer_projection.weight"] = (hidden, width)
        found["post_per_layer_input_norm.weight"] = (hidden,)
    if config.get("enable_moe_block"):
        count, wide = config["num_experts"], config["moe_intermediate_size"]
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            found[f"{name}.weight"] = (hidden,)
        found["pre_feedforward_layernorm_2.weight"] = (hidden,)
        found["router.proj.weight"], found["router.scale"] = (count, hidden), (hidden,)
        found["router.per_expert_scale"] = (count,)
        found["experts.gate_up_proj"] = (count, 2 * wide, hidden)
        found["experts.down_proj"] = (count, hidden, wide)
    return found


def _qwen3_5(config: Config, layer: int) -> Shapes:
    hidden = config["hidden_size"]
    found: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config["layer_types"][layer] == "full_attention":
        found |= _attention(config, query_rows=2)
    else:
        heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * dim
        net = {
            "in_proj_qkv.weight": (channels, hidden),
            "in_proj_z.weight": (heads * dim, hidden),
            "in_proj_a.weight": (heads, hidden),
            "in_proj_b.weight": (heads, hidden),
            "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (dim,),
            "out_proj.weight": (hidden, heads * dim),
        }
        found |= {f"linear_attn.{name}": shape for name, shape in net.items()}
    if "num_experts" not in config:
        return found | _mlp("mlp", hidden, config["intermediate_size"])
    count, wide = config["num_experts"], config["moe_intermediate_size"]
    found["mlp.gate.weight"] = (count, hidden)
    found["mlp.experts.gate_up_proj"] = (count, 2 * wide, hidden)
    found["mlp.experts.down_proj"] = (count, hidden, wide)
    found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found | _mlp("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])


def _attention(config: Config, query_rows: int) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "self_attn.q_proj.weight": (query_rows * heads * dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _mlp(module: str, hidden: int, wide: int) -> Shapes:
    return {
        f"{module}.gate_proj.weight": (wide, hidden),
        f"{module}.up_proj.weight": (wide, hidden),
        f"{module}.down_proj.weight": (hidden, wide),
    }
