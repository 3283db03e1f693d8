"""Qwen 3.5, 3.6 and 3.8, dense or with experts, alone or inside a multimodal model: gated delta nets, and attention
in every fourth layer. Source: transformers 5.24 `modeling_qwen3_5.py`, `modeling_qwen3_5_moe.py`.

Hugging Face's layout holds norms less 1 and the convolution as [C, 1, K], MLX's whole norms and [C, K, 1].
"""

import mlx.core as mx

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from shared.kv_layout import attention_kinds, kv_layers
from worker.layers.activations import activation
from worker.layers.attention import Attention
from worker.layers.moe import SoftmaxRouter, SparseMLP, gated
from worker.layers.norm import RMSNorm
from worker.layers.recurrent import GatedDeltaNet, Heads
from worker.layers.rope import Rope, make_rope
from worker.models.config import checked, convert, has_one_rope
from worker.models.decoder import Block, Decoder, Layer
from worker.models.llama import Mlp, drop_leftovers, gated_mlp, grouped_attention
from worker.models.moe import SparseConfig, experts
from worker.models.wrapped import TOWERS, drop, unwrap
from worker.weights import Weights

GUESSING = "mtp."
"""Layers that guess tokens further ahead, for speculative decoding."""


class Qwen35Config(SparseConfig, frozen=True, kw_only=True):
    """`num_experts` 0: a dense model."""

    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    output_gate_type: str = "swish"

    @property
    def heads(self) -> Heads:
        return Heads(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, Qwen35Config), checkpoint)
    has_one_rope(checkpoint, config.rope_parameters)
    if config.output_gate_type != "swish":
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: config.json: output_gate_type {config.output_gate_type!r} is not supported, "
            "only swish",
        )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{checkpoint.path}: config.json: linear_num_value_heads {config.linear_num_value_heads} is no "
            f"multiple of linear_num_key_heads {config.linear_num_key_heads}",
        )
    unwrap(weights)
    drop(weights, *TOWERS, GUESSING, f"model.{GUESSING}")
    drop_leftovers(weights, tied=config.tie_word_embeddings)
    kinds = attention_kinds(checkpoint.config)
    less = _norms_are_less(weights, kinds)
    hidden = config.hidden_size
    rope = make_rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def norm(name: str, size: int = hidden) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", size, plus=less), config.rms_norm_eps)

    def layer(index: int) -> Block:
        prefix = f"model.layers.{index}"
        mixer: Layer
        if kinds[index] == "linear_attention":
            mixer = _delta_net(weights, config, index, f"{prefix}.linear_attn")
        else:
            at = f"{prefix}.self_attn"
            q_norm, k_norm = (norm(f"{at}.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
            mixer = _attention(weights, config, index, at, rope, q_norm, k_norm)
        return Block(
            norm(f"{prefix}.input_layernorm"),
            mixer,
            norm(f"{prefix}.post_attention_layernorm"),
            _mlp(weights, config, f"{prefix}.mlp"),
        )

    tied = config.tie_word_embeddings
    return Decoder(
        embed=weights.embedding("model.embed_tokens", config.vocab_size, hidden),
        layers=[layer(index) for index in range(config.num_hidden_layers)],
        norm=norm("model.norm"),
        head=None if tied else weights.linear("lm_head", hidden, config.vocab_size),
        layout=kv_layers(checkpoint.config),
        ropes={"": rope},
    )


def _norms_are_less(weights: Weights, kinds: list[str]) -> int:
    """1 in Hugging Face's layout, 0 in MLX's, told apart by the convolution."""
    for index, kind in enumerate(kinds):
        name = f"model.layers.{index}.linear_attn.conv1d.weight"
        if kind == "linear_attention" and name in weights:
            conv = weights.pop(name)
            weights.put(name, conv)
            return int(conv.ndim == 3 and conv.shape[1] == 1 and conv.shape[2] != 1)
    return 1


def _delta_net(weights: Weights, config: Qwen35Config, index: int, prefix: str) -> GatedDeltaNet:
    hidden, heads, taps = config.hidden_size, config.heads, config.linear_conv_kernel_dim
    wide = heads.values * heads.value_dim
    channels = 2 * heads.keys * heads.key_dim + wide
    name = f"{prefix}.conv1d.weight"
    conv = weights.pop(name)
    if sorted(conv.shape) != sorted((channels, 1, taps)) or conv.shape[0] != channels:
        raise weights.bad(
            f"tensor {name} has shape {list(conv.shape)}, config.json asks for {[channels, 1, taps]}"
        )
    weights.put(f"{prefix}.conv1d", conv.reshape(channels * taps))
    return GatedDeltaNet(
        place=index,
        heads=heads,
        qkv=weights.linear(f"{prefix}.in_proj_qkv", hidden, channels),
        z=weights.linear(f"{prefix}.in_proj_z", hidden, wide),
        a=weights.linear(f"{prefix}.in_proj_a", hidden, heads.values),
        b=weights.linear(f"{prefix}.in_proj_b", hidden, heads.values),
        out=weights.linear(f"{prefix}.out_proj", wide, hidden),
        conv=weights.vector(f"{prefix}.conv1d", channels * taps).reshape(channels, taps),
        rate=-mx.exp(weights.vector(f"{prefix}.A_log", heads.values, dtype=mx.float32)),
        dt_bias=weights.vector(f"{prefix}.dt_bias", heads.values, dtype=mx.float32),
        norm=weights.vector(f"{prefix}.norm.weight", heads.value_dim, dtype=mx.float32),
        eps=config.rms_norm_eps,
    )


def _attention(
    weights: Weights,
    config: Qwen35Config,
    index: int,
    prefix: str,
    rope: Rope,
    q_norm: RMSNorm,
    k_norm: RMSNorm,
) -> Attention:
    return grouped_attention(
        weights,
        config,
        index,
        prefix,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        scale=config.head_dim**-0.5 * rope.softmax_factor,
        q_norm=q_norm,
        k_norm=k_norm,
        gate=True,
    )


def _mlp(weights: Weights, config: Qwen35Config, prefix: str) -> Mlp:
    if not config.num_experts:
        return gated_mlp(weights, config, prefix, config.intermediate_size)
    hidden = config.hidden_size
    router = SoftmaxRouter(
        weights.linear(f"{prefix}.gate", hidden, config.num_experts),
        config.num_experts_per_tok,
        normalise=True,
    )
    combine = gated(activation(config.hidden_act))
    chosen = experts(weights, config, combine, module=f"{prefix}.experts", stacks=f"{prefix}.switch_mlp")
    shared = gated_mlp(weights, config, f"{prefix}.shared_expert", config.shared_expert_intermediate_size)
    gate = weights.linear(f"{prefix}.shared_expert_gate", hidden, 1)
    return SparseMLP(router, chosen, lambda x: mx.sigmoid(gate(x)) * shared(x))
