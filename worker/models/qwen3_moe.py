"""Qwen3 with experts. Source: transformers 5.24 `modeling_qwen3_moe.py`."""

from shared.checkpoint import Checkpoint
from worker.layers.activations import activation
from worker.layers.moe import SoftmaxRouter, SparseMLP, gated
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import Mlp, dense, gated_mlp
from worker.models.moe import SparseConfig, experts
from worker.weights import Weights


class Qwen3MoeConfig(SparseConfig, frozen=True, kw_only=True):
    """`mlp_only_layers`: layers without experts, besides those that are no multiple of `decoder_sparse_step`."""

    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, Qwen3MoeConfig), checkpoint)

    def mlp(index: int, prefix: str) -> Mlp:
        if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
            return gated_mlp(weights, config, prefix, config.intermediate_size)
        gate = weights.linear(f"{prefix}.gate", config.hidden_size, config.num_experts)
        router = SoftmaxRouter(gate, config.num_experts_per_tok, normalise=config.norm_topk_prob)
        combine = gated(activation(config.hidden_act))
        return SparseMLP(
            router,
            experts(weights, config, combine, module=f"{prefix}.experts", stacks=f"{prefix}.switch_mlp"),
        )

    bias = config.attention_bias
    return dense(checkpoint, weights, config, qkv_bias=bias, o_bias=bias, head_norms=True, mlp=mlp)
