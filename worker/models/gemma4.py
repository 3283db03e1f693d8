"""Gemma 4 in all its sizes, alone or inside a multimodal model. Source: transformers 5.24 `modeling_gemma4.py`.

Sliding and full layers have their own rope, heads and keys. What a size has beyond that its config says: layers that
use the keys and values of earlier ones, inputs of each layer looked up by token (E2B, E4B), values that are the keys
(12B, 31B), experts beside the MLP (26B-A4B).
"""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from shared.kv_layout import attention_kinds, kv_layers, layer_sizes
from worker.layers.activations import Activation, activation
from worker.layers.attention import Attention
from worker.layers.batch import Batch
from worker.layers.linear import Linear
from worker.layers.moe import Experts, Routing, gated, top_k
from worker.layers.norm import Norm, RMSNorm
from worker.layers.rope import make_rope
from worker.models.config import convert, ropes_by_kind
from worker.models.decoder import Decoder, Layer, Sandwich
from worker.models.llama import Mlp, drop_leftovers, gated_mlp
from worker.models.moe import SparseConfig, experts
from worker.models.wrapped import TOWERS, drop, unwrap
from worker.weights import Weights


class Gemma4Config(SparseConfig, frozen=True, kw_only=True):
    """`hidden_size_per_layer_input` 0: no inputs of layers. `use_double_wide_mlp`: of layers without own keys."""

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    enable_moe_block: bool = False
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str = ""
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 262144


class Gemma4Router:
    """Scores of the normed stream; the greatest `k`, weighed by softmax among themselves times an expert's `scale`."""

    __slots__ = ("gate", "k", "norm", "scale")

    def __init__(self, norm: Norm, gate: Linear, k: int, scale: mx.array) -> None:
        self.norm, self.gate, self.k, self.scale = norm, gate, k, scale

    def __call__(self, x: mx.array) -> Routing:
        scores = self.gate(self.norm(x)).astype(mx.float32)
        indices = top_k(scores, self.k)
        weights = mx.softmax(mx.take_along_axis(scores, indices, axis=-1), axis=-1)
        return indices, weights * self.scale[indices]


class MlpAndExperts:
    """An MLP and experts side by side; all of it reads the residual stream, each through a norm of its own."""

    __slots__ = ("experts", "experts_after", "experts_norm", "mlp", "mlp_after", "mlp_norm", "router")

    def __init__(
        self,
        mlp_norm: Norm,
        mlp: Mlp,
        mlp_after: Norm,
        router: Gemma4Router,
        experts_norm: Norm,
        experts: Experts,
        experts_after: Norm,
    ) -> None:
        self.mlp_norm, self.mlp, self.mlp_after = mlp_norm, mlp, mlp_after
        self.router = router
        self.experts_norm, self.experts, self.experts_after = experts_norm, experts, experts_after

    def __call__(self, x: mx.array) -> mx.array:
        dense = self.mlp_after(self.mlp(self.mlp_norm(x)))
        return dense + self.experts_after(self.experts(self.experts_norm(x), self.router(x)))


class LayerInput:
    """x + norm(up(act(gate(x)) * the input of layer `index`))."""

    __slots__ = ("act", "gate", "index", "norm", "up")

    def __init__(self, index: int, gate: Linear, act: Activation, up: Linear, norm: Norm) -> None:
        self.index, self.gate, self.act, self.up, self.norm = index, gate, act, up, norm

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        assert batch.layer_inputs is not None
        return x + self.norm(self.up(self.act(self.gate(x)) * batch.layer_inputs[:, self.index]))


class Gemma4Layer:
    """A sandwich, then the input of the layer where the model has such, then times `scale` [1]."""

    __slots__ = ("layer_input", "sandwich", "scale")

    def __init__(self, sandwich: Sandwich, layer_input: LayerInput | None, scale: mx.array) -> None:
        self.sandwich, self.layer_input, self.scale = sandwich, layer_input, scale

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        x = self.sandwich(x, batch)
        if self.layer_input is not None:
            x = self.layer_input(x, batch)
        return x * self.scale


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = convert(checkpoint, Gemma4Config)
    kinds, sizes = attention_kinds(checkpoint.config), layer_sizes(checkpoint.config)
    _check(checkpoint, config, kinds, sizes)
    unwrap(weights)
    drop(weights, *TOWERS)
    drop_leftovers(weights, tied=config.tie_word_embeddings)
    donors = config.num_hidden_layers - config.num_kv_shared_layers
    _drop_unused_keys(weights, donors)
    ropes = {
        kind: make_rope(params, sizes[kinds.index(kind)][1], config.max_position_embeddings)
        for kind, params in ropes_by_kind(checkpoint, config.rope_parameters, kinds).items()
    }
    hidden = config.hidden_size

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        kind = kinds[index]
        donor = max(n for n in range(donors) if kinds[n] == kind) if index >= donors else index
        attention = _attention(weights, config, index, donor, kind, sizes[index], ropes[kind].softmax_factor)
        mlp, mlp_norm = _mlp(weights, config, prefix, wide=index >= donors)
        return Gemma4Layer(
            Sandwich(
                _norm(weights, config, f"{prefix}.input_layernorm"),
                attention,
                _norm(weights, config, f"{prefix}.post_attention_layernorm"),
                mlp_norm,
                mlp,
                _norm(weights, config, f"{prefix}.post_feedforward_layernorm"),
            ),
            _layer_input(weights, config, index) if config.hidden_size_per_layer_input else None,
            weights.vector(f"{prefix}.layer_scalar", 1),
        )

    tied = config.tie_word_embeddings
    return Decoder(
        embed=weights.embedding("model.embed_tokens", config.vocab_size, hidden),
        layers=[layer(index) for index in range(config.num_hidden_layers)],
        norm=_norm(weights, config, "model.norm"),
        head=None if tied else weights.linear("lm_head", hidden, config.vocab_size),
        layout=kv_layers(checkpoint.config),
        ropes=ropes,
        embed_scale=hidden**0.5,
        softcap=config.final_logit_softcapping,
        layer_inputs=_layer_inputs(weights, config) if config.hidden_size_per_layer_input else None,
    )


def _check(
    checkpoint: Checkpoint, config: Gemma4Config, kinds: Sequence[str], sizes: Sequence[tuple[int, int]]
) -> None:
    """Refuses what the graph cannot be."""
    where = f"{checkpoint.path}: config.json"
    if config.use_bidirectional_attention == "all":
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{where}: use_bidirectional_attention 'all' is for embeddings, not for text",
        )
    for kind, (kv_heads, dim) in zip(kinds, sizes, strict=True):
        if config.num_attention_heads % kv_heads:
            raise refuse(
                ErrorCode.BAD_CHECKPOINT,
                f"{where}: {config.num_attention_heads} attention heads do not divide into {kv_heads} "
                "key-value heads",
            )
        if (kv_heads, dim) != sizes[kinds.index(kind)]:
            raise refuse(ErrorCode.UNSUPPORTED, f"{where}: layers of {kind} have heads of several sizes")
    donors = set(kinds[: config.num_hidden_layers - config.num_kv_shared_layers])
    if missing := sorted(set(kinds) - donors):
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{where}: with num_kv_shared_layers {config.num_kv_shared_layers} no layer of {missing[0]} has keys "
            "of its own",
        )


def _drop_unused_keys(weights: Weights, donors: int) -> None:
    """The first exports carry projections of layers that use the keys of others."""
    unused = ("k_proj", "v_proj", "k_norm")

    def is_unused(name: str) -> bool:
        parts = name.split(".")
        return (
            name.startswith("model.layers.")
            and parts[2].isdigit()
            and int(parts[2]) >= donors
            and parts[3] == "self_attn"
            and parts[4] in unused
        )

    weights.rename(lambda name: None if is_unused(name) else name)


def _norm(weights: Weights, config: Gemma4Config, name: str, size: int = 0) -> RMSNorm:
    return RMSNorm(weights.vector(f"{name}.weight", size or config.hidden_size), config.rms_norm_eps)


def _attention(
    weights: Weights,
    config: Gemma4Config,
    index: int,
    donor: int,
    kind: str,
    sizes: tuple[int, int],
    scale: float,
) -> Attention:
    """`donor`: the layer whose keys and values are used; only layers before the first user of another's have some."""
    prefix = f"model.layers.{index}.self_attn"
    hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    kv_heads, dim = sizes

    def keys(name: str) -> Linear | None:
        if index != donor:
            return None
        return weights.linear(f"{prefix}.{name}", hidden, kv_heads * dim, bias=bias)

    values_are_keys = config.attention_k_eq_v and kind == "full_attention"
    return Attention(
        place=donor,
        q=weights.linear(f"{prefix}.q_proj", hidden, heads * dim, bias=bias),
        k=keys("k_proj"),
        v=None if values_are_keys else keys("v_proj"),
        o=weights.linear(f"{prefix}.o_proj", heads * dim, hidden, bias=bias),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=scale,
        rotation=kind,
        q_norm=_norm(weights, config, f"{prefix}.q_norm", dim),
        k_norm=_norm(weights, config, f"{prefix}.k_norm", dim) if index == donor else None,
        v_norm=RMSNorm(None, config.rms_norm_eps),
        lends=config.num_kv_shared_layers > 0,
    )


def _mlp(weights: Weights, config: Gemma4Config, prefix: str, *, wide: bool) -> tuple[Mlp, Norm | None]:
    """The MLP of a layer, and the norm before it if it does not norm by itself."""
    width = config.intermediate_size * (2 if wide and config.use_double_wide_mlp else 1)
    dense = gated_mlp(weights, config, f"{prefix}.mlp", width)
    norm = _norm(weights, config, f"{prefix}.pre_feedforward_layernorm")
    if not config.enable_moe_block:
        return dense, norm
    hidden, count = config.hidden_size, config.num_experts
    router = Gemma4Router(
        RMSNorm(
            weights.vector(f"{prefix}.router.scale", hidden, times=hidden**-0.5),
            config.rms_norm_eps,
        ),
        weights.linear(f"{prefix}.router.proj", hidden, count),
        config.num_experts_per_tok,
        weights.vector(f"{prefix}.router.per_expert_scale", count, dtype=mx.float32),
    )
    module = f"{prefix}.experts"
    chosen = experts(
        weights, config, gated(activation(config.hidden_act)), module=module, stacks=f"{module}.switch_glu"
    )
    return MlpAndExperts(
        norm,
        dense,
        _norm(weights, config, f"{prefix}.post_feedforward_layernorm_1"),
        router,
        _norm(weights, config, f"{prefix}.pre_feedforward_layernorm_2"),
        chosen,
        _norm(weights, config, f"{prefix}.post_feedforward_layernorm_2"),
    ), None


def _layer_input(weights: Weights, config: Gemma4Config, index: int) -> LayerInput:
    prefix, width = f"model.layers.{index}", config.hidden_size_per_layer_input
    return LayerInput(
        index,
        weights.linear(f"{prefix}.per_layer_input_gate", config.hidden_size, width),
        activation(config.hidden_act),
        weights.linear(f"{prefix}.per_layer_projection", width, config.hidden_size),
        _norm(weights, config, f"{prefix}.post_per_layer_input_norm"),
    )


def _layer_inputs(weights: Weights, config: Gemma4Config) -> Callable[[mx.array, Batch], mx.array]:
    """What all layers get of a token, `[T, layers, width]`: looked up by its id, and made of its embedding."""
    width, layers, hidden = (
        config.hidden_size_per_layer_input,
        config.num_hidden_layers,
        config.hidden_size,
    )
    table = weights.embedding(
        "model.embed_tokens_per_layer", config.vocab_size_per_layer_input, layers * width
    )
    projection = weights.linear("model.per_layer_model_projection", hidden, layers * width)
    norm = _norm(weights, config, "model.per_layer_projection_norm", width)

    def inputs(x: mx.array, batch: Batch) -> mx.array:
        by_id = table(batch.tokens) * mx.array(width**0.5, x.dtype)
        made = norm((projection(x) * hidden**-0.5).reshape(-1, layers, width))
        both: mx.array = made + by_id.reshape(-1, layers, width)
        return both * math.sqrt(0.5)

    return inputs
