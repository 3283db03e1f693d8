"""Gemma 3, alone or inside its multimodal model. Source: transformers 5.24 `modeling_gemma3.py`.

Sliding and full layers with a rope each, norms on both sides of attention and MLP, whose weights are stored less 1.
"""

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from shared.kv_layout import attention_kinds, kv_layers
from worker.layers.attention import Attention
from worker.layers.norm import RMSNorm
from worker.layers.rope import make_rope
from worker.models.config import checked, convert, ropes_by_kind
from worker.models.decoder import Decoder, Sandwich
from worker.models.llama import LlamaConfig, drop_leftovers, gated_mlp, grouped_attention
from worker.models.wrapped import TOWERS, drop, unwrap
from worker.weights import Weights


class Gemma3Config(LlamaConfig, frozen=True, kw_only=True):
    """`query_pre_attn_scalar`: the softmax scale is its inverse square root."""

    query_pre_attn_scalar: float
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, Gemma3Config), checkpoint)
    if config.use_bidirectional_attention:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: config.json: use_bidirectional_attention is for embeddings, not for text",
        )
    unwrap(weights)
    drop(weights, *TOWERS)
    drop_leftovers(weights, tied=config.tie_word_embeddings)
    hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
    kinds = attention_kinds(checkpoint.config)
    ropes = {
        kind: make_rope(params, dim, config.max_position_embeddings)
        for kind, params in ropes_by_kind(checkpoint, config.rope_parameters, kinds).items()
    }

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", size, plus=1), config.rms_norm_eps)

    def attention(index: int, prefix: str) -> Attention:
        return grouped_attention(
            weights,
            config,
            index,
            prefix,
            qkv_bias=bias,
            o_bias=bias,
            scale=config.query_pre_attn_scalar**-0.5 * ropes[kinds[index]].softmax_factor,
            rotation=kinds[index],
            q_norm=norm(f"{prefix}.q_norm", dim),
            k_norm=norm(f"{prefix}.k_norm", dim),
        )

    def layer(index: int) -> Sandwich:
        prefix = f"model.layers.{index}"
        return Sandwich(
            norm(f"{prefix}.input_layernorm", hidden),
            attention(index, f"{prefix}.self_attn"),
            norm(f"{prefix}.post_attention_layernorm", hidden),
            norm(f"{prefix}.pre_feedforward_layernorm", hidden),
            gated_mlp(weights, config, f"{prefix}.mlp", config.intermediate_size),
            norm(f"{prefix}.post_feedforward_layernorm", hidden),
        )

    tied = config.tie_word_embeddings
    return Decoder(
        embed=weights.embedding("model.embed_tokens", config.vocab_size, hidden),
        layers=[layer(index) for index in range(config.num_hidden_layers)],
        norm=norm("model.norm", hidden),
        head=None if tied else weights.linear("lm_head", hidden, config.vocab_size),
        layout=kv_layers(checkpoint.config),
        ropes=ropes,
        embed_scale=hidden**0.5,
        softcap=config.final_logit_softcapping,
    )
