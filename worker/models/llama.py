"""Llama, and what is the same graph under other names: mistral, ministral3, and by their own files qwen2 and the like.

Source: transformers 5.24 `modeling_llama.py`, `modeling_mistral.py`, `modeling_ministral3.py`.
"""

import math
from typing import Any

import mlx.core as mx
import msgspec

from shared.checkpoint import Checkpoint
from shared.kv_layout import kv_layers
from worker.layers.activations import activation
from worker.layers.attention import Attention
from worker.layers.batch import Batch
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.rope import make_rope
from worker.models.config import checked, convert, has_one_rope
from worker.models.decoder import Block, Decoder
from worker.weights import Weights


class LlamaConfig(msgspec.Struct, frozen=True):
    """What the graph reads of a normalised config; sizes are counts of values."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, LlamaConfig), checkpoint)
    return dense(checkpoint, weights, config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)


def dense(
    checkpoint: Checkpoint,
    weights: Weights,
    config: LlamaConfig,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    head_norms: bool = False,
) -> Decoder:
    """The llama graph with what its relatives add: biases, and norms over each head of queries and keys."""
    has_one_rope(checkpoint, config.rope_parameters)
    drop_leftovers(weights, tied=config.tie_word_embeddings)
    hidden, wide, dim, eps = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
        config.rms_norm_eps,
    )
    rope = make_rope(config.rope_parameters, dim, config.max_position_embeddings)
    scale = dim**-0.5 * rope.softmax_factor
    act = activation(config.hidden_act)

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", size), eps)

    def layer(index: int) -> Block:
        prefix = f"model.layers.{index}"
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention = Attention(
            place=index,
            q=weights.linear(f"{prefix}.self_attn.q_proj", hidden, heads * dim, bias=qkv_bias),
            k=weights.linear(f"{prefix}.self_attn.k_proj", hidden, kv_heads * dim, bias=qkv_bias),
            v=weights.linear(f"{prefix}.self_attn.v_proj", hidden, kv_heads * dim, bias=qkv_bias),
            o=weights.linear(f"{prefix}.self_attn.o_proj", heads * dim, hidden, bias=o_bias),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=scale,
            q_norm=norm(f"{prefix}.self_attn.q_norm", dim) if head_norms else None,
            k_norm=norm(f"{prefix}.self_attn.k_norm", dim) if head_norms else None,
        )
        mlp = GatedMLP(
            weights.linear(f"{prefix}.mlp.gate_proj", hidden, wide, bias=config.mlp_bias),
            weights.linear(f"{prefix}.mlp.up_proj", hidden, wide, bias=config.mlp_bias),
            weights.linear(f"{prefix}.mlp.down_proj", wide, hidden, bias=config.mlp_bias),
            act,
        )
        before, between = (
            norm(f"{prefix}.input_layernorm", hidden),
            norm(f"{prefix}.post_attention_layernorm", hidden),
        )
        return Block(before, attention, between, mlp)

    tied = config.tie_word_embeddings
    return Decoder(
        embed=weights.embedding("model.embed_tokens", config.vocab_size, hidden),
        layers=[layer(index) for index in range(config.num_hidden_layers)],
        norm=norm("model.norm", hidden),
        head=None if tied else weights.linear("lm_head", hidden, config.vocab_size),
        layout=kv_layers(checkpoint.config),
        ropes={"": rope},
        query_scale=far_queries(config.rope_parameters),
    )


def drop_leftovers(weights: Weights, *, tied: bool) -> None:
    """Old exports carry rotary tables; tied ones sometimes carry the head that is the embedding again."""
    weights.rename(
        lambda name: None if "rotary_emb" in name or (tied and name.startswith("lm_head.")) else name
    )


def far_queries(rope: dict[str, Any]) -> Any:
    """Llama 4's scaling of far queries: 1 + beta log(1 + floor(position / original length)). None without one."""
    beta = float(rope.get("llama_4_scaling_beta", 0.0))
    original = int(rope.get("original_max_position_embeddings", 0))
    if not beta:
        return None

    def scale(batch: Batch, dtype: mx.Dtype) -> mx.array | None:
        if all(row.offset + row.length <= original for row in batch.rows):
            return None
        positions = [p for row in batch.rows for p in range(row.offset, row.offset + row.length)]
        steps = [math.log1p(position // original) for position in positions]
        return (1 + beta * mx.array(steps, mx.float32))[:, None, None].astype(dtype)

    return scale
