"""DeepSeek-V3 and R1, and GLM-4.7-Flash, the same graph: latent attention and routed experts.

Source: transformers 5.24 `modeling_deepseek_v3.py`, `modeling_glm4_moe_lite.py`.
"""

from collections.abc import Callable

import mlx.core as mx

from shared.checkpoint import Checkpoint
from worker.layers.linear import Linear
from worker.layers.mla import LatentAttention
from worker.layers.norm import RMSNorm
from worker.layers.rope import make_rope, yarn_mscale
from worker.layers.stacked import HeadStack, Turned
from worker.models.config import convert, has_one_rope
from worker.models.decoder import Decoder
from worker.models.llama import Mlp, gated_mlp, prenorm
from worker.models.moe import RoutedConfig, drop_prediction_layers, routed_mlp
from worker.weights import Weights

LATENT_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


class DeepseekConfig(RoutedConfig, frozen=True, kw_only=True):
    """`q_lora_rank` 0: queries are not compressed."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    rope_interleave: bool = True


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = convert(checkpoint, DeepseekConfig)
    has_one_rope(checkpoint, config.rope_parameters)
    drop_prediction_layers(weights, config)
    rope = make_rope(
        config.rope_parameters,
        config.qk_rope_head_dim,
        config.max_position_embeddings,
        interleaved=config.rope_interleave,
    )
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank

    def attention(index: int, prefix: str) -> LatentAttention:
        keys, values = _heads(weights, config, prefix)
        return LatentAttention(
            place=index,
            q=_queries(weights, config, prefix),
            kv_a=weights.linear(
                f"{prefix}.kv_a_proj_with_mqa",
                hidden,
                rank + config.qk_rope_head_dim,
                bias=config.attention_bias,
            ),
            kv_norm=RMSNorm(weights.vector(f"{prefix}.kv_a_layernorm.weight", rank), LATENT_EPS),
            keys=keys,
            values=values,
            o=weights.linear(
                f"{prefix}.o_proj", heads * config.v_head_dim, hidden, bias=config.attention_bias
            ),
            num_heads=heads,
            nope=config.qk_nope_head_dim,
            rank=rank,
            value_dim=config.v_head_dim,
            scale=_scale(config),
            turned_factor=rope.softmax_factor,
        )

    def mlp(index: int, prefix: str) -> Mlp:
        if config.is_sparse(index):
            return routed_mlp(weights, config, prefix)
        return gated_mlp(weights, config, prefix, config.intermediate_size)

    return prenorm(checkpoint, weights, config, rope, attention, mlp)


def _queries(weights: Weights, config: DeepseekConfig, prefix: str) -> Callable[[mx.array], mx.array]:
    hidden, rank = config.hidden_size, config.q_lora_rank
    out = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if not rank:
        return weights.linear(f"{prefix}.q_proj", hidden, out)
    down: Linear = weights.linear(f"{prefix}.q_a_proj", hidden, rank, bias=config.attention_bias)
    norm = RMSNorm(weights.vector(f"{prefix}.q_a_layernorm.weight", rank), LATENT_EPS)
    up: Linear = weights.linear(f"{prefix}.q_b_proj", rank, out)
    return lambda x: up(norm(down(x)))


def _heads(weights: Weights, config: DeepseekConfig, prefix: str) -> tuple[HeadStack, HeadStack]:
    """What makes keys and values of latents: `kv_b_proj`, or the two stacks that MLX makes of it."""
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    nope, value_dim = config.qk_nope_head_dim, config.v_head_dim
    if f"{prefix}.embed_q.weight" in weights:
        turned = Turned(weights.stacked(f"{prefix}.embed_q", heads, nope, rank))
        return turned, weights.stacked(f"{prefix}.unembed_out", heads, rank, value_dim)
    fused = f"{prefix}.kv_b_proj"
    for leaf in ("weight", "scales", "biases"):
        name = f"{fused}.{leaf}"
        if name not in weights:
            continue
        whole = weights.pop(name)
        if whole.shape[0] != heads * (nope + value_dim):
            raise weights.bad(
                f"tensor {name} has {whole.shape[0]} rows, config.json asks for {heads * (nope + value_dim)}"
            )
        whole = whole.reshape(heads, nope + value_dim, -1)
        for part, rows in (("keys", whole[:, :nope]), ("values", whole[:, nope:])):
            weights.put(f"{fused}.{part}.{leaf}", mx.contiguous(rows), quantized_as=fused)
    return (
        weights.stacked(f"{fused}.keys", heads, rank, nope),
        weights.stacked(f"{fused}.values", heads, rank, value_dim),
    )


def _scale(config: DeepseekConfig) -> float:
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return scale
    return scale * yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
