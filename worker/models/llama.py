"""Llama, and what is the same graph under other names: mistral, ministral3, and by their own files qwen2 and the like.

Source: transformers 5.24 `modeling_llama.py`, `modeling_mistral.py`, `modeling_ministral3.py`.
"""

import math
from collections.abc import Callable
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
from worker.layers.rope import Rope, make_rope
from worker.models.config import checked, convert, has_one_rope
from worker.models.decoder import Block, Decoder, Layer
from worker.weights import Weights

Mlp = Callable[[mx.array], mx.array]
"""`[T, D]` to the same shape."""

MakeMlp = Callable[[int, str], Mlp]
"""Of the layer so numbered and the name of its MLP's modules."""


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
    sinks: bool = False,
    rotates: Callable[[int], bool] = lambda index: True,
    mlp: MakeMlp | None = None,
) -> Decoder:
    """The llama graph with what its relatives add: biases, norms over each head of queries and keys, sinks.

    `rotates`: whether a layer turns queries and keys. `mlp`: other than `gated_mlp`.
    """
    has_one_rope(checkpoint, config.rope_parameters)
    dim = config.head_dim
    rope = make_rope(config.rope_parameters, dim, config.max_position_embeddings)

    def head_norm(name: str) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", dim), config.rms_norm_eps)

    def attention(index: int, prefix: str) -> Attention:
        return grouped_attention(
            weights,
            config,
            index,
            prefix,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            scale=dim**-0.5 * rope.softmax_factor,
            rotation="" if rotates(index) else None,
            q_norm=head_norm(f"{prefix}.q_norm") if head_norms else None,
            k_norm=head_norm(f"{prefix}.k_norm") if head_norms else None,
            sinks=weights.vector(f"{prefix}.sinks", config.num_attention_heads) if sinks else None,
        )

    return prenorm(checkpoint, weights, config, rope, attention, mlp)


def grouped_attention(
    weights: Weights,
    config: LlamaConfig,
    place: int,
    prefix: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    gate: bool = False,
    **more: Any,
) -> Attention:
    """The attention of the modules `prefix`, under llama's names; `more`: what else `Attention` takes."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return Attention(
        place=place,
        q=weights.linear(f"{prefix}.q_proj", hidden, (1 + gate) * heads * dim, bias=qkv_bias),
        k=weights.linear(f"{prefix}.k_proj", hidden, kv_heads * dim, bias=qkv_bias),
        v=weights.linear(f"{prefix}.v_proj", hidden, kv_heads * dim, bias=qkv_bias),
        o=weights.linear(f"{prefix}.o_proj", heads * dim, hidden, bias=o_bias),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        gate=gate,
        **more,
    )


def prenorm(
    checkpoint: Checkpoint,
    weights: Weights,
    config: LlamaConfig,
    rope: Rope,
    mixer: Callable[[int, str], Layer],
    mlp: MakeMlp | None = None,
) -> Decoder:
    """Llama's layers under llama's names, around whatever attention and MLP `mixer` and `mlp` make."""
    is_bare = weights.name_bare()
    drop_leftovers(weights, tied=config.tie_word_embeddings)
    hidden = config.hidden_size
    mlp = mlp or (lambda index, prefix: gated_mlp(weights, config, prefix, config.intermediate_size))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", hidden), config.rms_norm_eps)

    def layer(index: int) -> Block:
        prefix = f"model.layers.{index}"
        return Block(
            norm(f"{prefix}.input_layernorm"),
            mixer(index, f"{prefix}.self_attn"),
            norm(f"{prefix}.post_attention_layernorm"),
            mlp(index, f"{prefix}.mlp"),
        )

    tied = config.tie_word_embeddings or (is_bare and "lm_head.weight" not in weights)
    return Decoder(
        embed=weights.embedding("model.embed_tokens", config.vocab_size, hidden),
        layers=[layer(index) for index in range(config.num_hidden_layers)],
        norm=norm("model.norm"),
        head=None if tied else weights.linear("lm_head", hidden, config.vocab_size),
        layout=kv_layers(checkpoint.config),
        ropes={"": rope},
        query_scale=far_queries(config.rope_parameters),
    )


def gated_mlp(weights: Weights, config: LlamaConfig, prefix: str, wide: int) -> GatedMLP:
    """The MLP of the modules `prefix`, `wide` values wide."""
    hidden, bias = config.hidden_size, config.mlp_bias
    return GatedMLP(
        weights.linear(f"{prefix}.gate_proj", hidden, wide, bias=bias),
        weights.linear(f"{prefix}.up_proj", hidden, wide, bias=bias),
        weights.linear(f"{prefix}.down_proj", wide, hidden, bias=bias),
        activation(config.hidden_act),
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
