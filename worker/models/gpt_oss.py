"""gpt-oss: sliding and full layers with sinks, experts in mxfp4. Source: transformers 5.24 `modeling_gpt_oss.py`.

The hub's layout holds gate and up rows in turns, as 4-bit numbers with a power of two for each 32 of them: MLX's
mxfp4 bit for bit, so they are only sorted. A checkpoint that is not quantized has them transposed.
"""

import mlx.core as mx

from shared.checkpoint import Checkpoint
from worker.layers.moe import SparseMLP, TopSoftmaxRouter, clipped_swiglu
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import Mlp, dense
from worker.models.moe import SparseConfig, experts
from worker.weights import Weights


class GptOssConfig(SparseConfig, frozen=True, kw_only=True):
    """Its experts are as wide as `intermediate_size` says."""

    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, GptOssConfig), checkpoint)

    def mlp(index: int, prefix: str) -> Mlp:
        module = f"{prefix}.experts"
        _sort_rows(weights, module)
        router = weights.linear(f"{prefix}.router", config.hidden_size, config.num_experts, bias=True)
        combine = clipped_swiglu(config.swiglu_alpha, config.swiglu_limit)
        return SparseMLP(
            TopSoftmaxRouter(router, config.num_experts_per_tok),
            experts(weights, config, combine, module=module, stacks=module, bias=True),
        )

    bias = config.attention_bias
    return dense(checkpoint, weights, config, qkv_bias=bias, o_bias=bias, sinks=True, mlp=mlp)


def _sort_rows(weights: Weights, module: str) -> None:
    """The hub's layout of the experts as MLX's; leaves MLX's alone."""
    for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        found: dict[str, mx.array] = {}
        if f"{module}.{fused}_blocks" in weights:
            found["weight"] = _words(weights, f"{module}.{fused}_blocks")
            found["scales"] = weights.pop(f"{module}.{fused}_scales")
        elif f"{module}.{fused}" in weights:
            found["weight"] = weights.pop(f"{module}.{fused}").swapaxes(-1, -2)
        if found:
            found["bias"] = weights.pop(f"{module}.{fused}_bias")
        for leaf, tensor in found.items():
            for number, part in enumerate(parts):
                weights.put(f"{module}.{part}.{leaf}", mx.contiguous(tensor[:, number :: len(parts)]))


def _words(weights: Weights, name: str) -> mx.array:
    """Blocks of 16 bytes `[E, out, in / 32, 16]` as words of 8 numbers `[E, out, in / 8]`."""
    blocks = weights.pop(name)
    if blocks.dtype != mx.uint8 or blocks.ndim != 4 or blocks.shape[-1] != 16:
        raise weights.bad(f"tensor {name} is {blocks.dtype} {list(blocks.shape)}, not blocks of 16 bytes")
    return blocks.view(mx.uint32).flatten(-2)
