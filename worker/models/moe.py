"""Experts out of a checkpoint: one layout of the weights whichever it has, and the layers of several families.

Layouts, told apart by what is there: a module an expert (`experts.7.gate_proj.weight`, Hugging Face's hub), fused
stacks (`experts.gate_up_proj` [E, 2 * wide, D], transformers 5), stacks (`switch_mlp.gate_proj.weight` [E, wide, D],
MLX). All become the last.
"""

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from worker.layers.activations import activation
from worker.layers.moe import Combine, Experts, SigmoidRouter, SparseMLP, gated
from worker.layers.stacked import DenseStacked
from worker.models.llama import LlamaConfig, Mlp, gated_mlp
from worker.weights import Weights

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class SparseConfig(LlamaConfig, frozen=True, kw_only=True):
    """What a model with experts adds."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False


class RoutedConfig(SparseConfig, frozen=True, kw_only=True):
    """What models with DeepSeek-V3's routing add."""

    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 1
    mlp_layer_types: tuple[str, ...] = ()
    scoring_func: str = "sigmoid"

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        if self.mlp_layer_types:
            return self.mlp_layer_types[index] == "sparse"
        return index >= self.first_k_dense_replace


def experts(
    weights: Weights,
    config: SparseConfig,
    combine: Combine,
    *,
    module: str,
    stacks: str,
    bias: bool = False,
) -> Experts:
    """The experts of one layer. `module`: where they are in Hugging Face's layouts, `stacks`: in MLX's."""
    _unify(weights, module, stacks, config.num_experts)
    hidden, wide = config.hidden_size, config.moe_intermediate_size

    gate, up, down = (
        weights.stacked(f"{stacks}.{name}", config.num_experts, in_dim, out_dim, bias=bias)
        for name, in_dim, out_dim in zip(
            PROJECTIONS, (hidden, hidden, wide), (wide, wide, hidden), strict=True
        )
    )
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and weights.dtype != mx.float32 and isinstance(gate, DenseStacked):
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{weights.checkpoint.path}: mlx's CPU backend runs experts that are not quantized in float32 only; "
            "choose dtype auto or float32",
            param="dtype",
        )
    return Experts(gate, up, down, combine)


def routed_mlp(weights: Weights, config: RoutedConfig, prefix: str) -> Mlp:
    """The MLP of a layer with DeepSeek-V3's routing and, where the model has them, shared experts."""
    if config.scoring_func != "sigmoid":
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{weights.checkpoint.path}: config.json: scoring_func {config.scoring_func!r} is not supported, "
            "only sigmoid",
        )
    count, wide = config.num_experts, config.moe_intermediate_size
    router = SigmoidRouter(
        weights.linear(f"{prefix}.gate", config.hidden_size, count, dtype=mx.float32),
        weights.vector(f"{prefix}.gate.e_score_correction_bias", count, dtype=mx.float32),
        config.num_experts_per_tok,
        groups=config.n_group,
        kept_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    combine = gated(activation(config.hidden_act))
    chosen = experts(weights, config, combine, module=f"{prefix}.experts", stacks=f"{prefix}.switch_mlp")
    shared = config.n_shared_experts
    return SparseMLP(
        router,
        chosen,
        gated_mlp(weights, config, f"{prefix}.shared_experts", wide * shared) if shared else None,
    )


def drop_prediction_layers(weights: Weights, config: RoutedConfig) -> None:
    """Drop the layers behind the last one: they guess tokens further ahead, for speculative decoding."""

    def is_behind(name: str) -> bool:
        number = name.removeprefix("model.layers.").partition(".")[0]
        return (
            name.startswith("model.layers.") and number.isdigit() and int(number) >= config.num_hidden_layers
        )

    weights.rename(lambda name: None if is_behind(name) else name)


def _unify(weights: Weights, module: str, stacks: str, count: int) -> None:
    if f"{module}.gate_up_proj" in weights:
        fused = weights.pop(f"{module}.gate_up_proj")
        wide = fused.shape[1] // 2
        weights.put(f"{stacks}.gate_proj.weight", mx.contiguous(fused[:, :wide]))
        weights.put(f"{stacks}.up_proj.weight", mx.contiguous(fused[:, wide:]))
        weights.put(f"{stacks}.down_proj.weight", weights.pop(f"{module}.down_proj"))
        return
    for name in PROJECTIONS:
        for leaf in ("weight", "scales", "biases", "bias"):
            if f"{module}.0.{name}.{leaf}" not in weights:
                continue
            parts = [weights.pop(f"{module}.{number}.{name}.{leaf}") for number in range(count)]
            odd = next((n for n, part in enumerate(parts) if part.shape != parts[0].shape), None)
            if odd is not None:
                raise weights.bad(
                    f"tensor {module}.{odd}.{name}.{leaf} has shape {list(parts[odd].shape)}, "
                    f"that of expert 0 has {list(parts[0].shape)}"
                )
            weights.put(f"{stacks}.{name}.{leaf}", mx.stack(parts), quantized_as=f"{module}.0.{name}")
