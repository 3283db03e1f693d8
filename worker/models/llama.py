"""The llama decoder: RMS norms, rotary attention with grouped heads, a gated MLP; mistral is the same graph.

Source: transformers 5.24 `modeling_llama.py`, `modeling_mistral.py`, `modeling_ministral3.py`. The graph is
lazy: nothing here evaluates or reads a value.
"""

import math
from typing import Any

import mlx.core as mx
import msgspec

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from shared.model_config import kv_layers
from worker.cache.kv import FullKV, LayerCache, Mask, RotatingKV
from worker.layers.activations import activation
from worker.layers.linear import Linear
from worker.layers.rope import Rotate, make_rope
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


class Attention:
    """Grouped-query attention of one layer."""

    def __init__(self, config: LlamaConfig, weights: Weights, prefix: str, scale: float) -> None:
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = dim
        self.scale = scale
        self.q = weights.linear(f"{prefix}.q_proj", hidden, self.num_heads * dim, bias=bias)
        self.k = weights.linear(f"{prefix}.k_proj", hidden, self.num_kv_heads * dim, bias=bias)
        self.v = weights.linear(f"{prefix}.v_proj", hidden, self.num_kv_heads * dim, bias=bias)
        self.o = weights.linear(f"{prefix}.o_proj", self.num_heads * dim, hidden, bias=bias)

    def __call__(
        self, x: mx.array, rotate: Rotate, mask: Mask, cache: LayerCache, query_scale: mx.array | None
    ) -> mx.array:
        """`x` [B, L, D] to the same shape."""
        batch, length, _ = x.shape
        dim = self.head_dim
        queries = self.q(x).reshape(batch, length, self.num_heads, dim).transpose(0, 2, 1, 3)
        keys = self.k(x).reshape(batch, length, self.num_kv_heads, dim).transpose(0, 2, 1, 3)
        values = self.v(x).reshape(batch, length, self.num_kv_heads, dim).transpose(0, 2, 1, 3)
        queries = rotate(queries)
        if query_scale is not None:
            queries = queries * query_scale
        keys, values = cache.update(rotate(keys), values)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class Layer:
    """One decoder block."""

    def __init__(self, config: LlamaConfig, weights: Weights, index: int, scale: float, window: int) -> None:
        prefix, hidden, wide = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        self.window = window
        self.eps = config.rms_norm_eps
        self.act = activation(config.hidden_act)
        self.input_norm = weights.vector(f"{prefix}.input_layernorm.weight", hidden)
        self.attention = Attention(config, weights, f"{prefix}.self_attn", scale)
        self.mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.gate = weights.linear(f"{prefix}.mlp.gate_proj", hidden, wide, bias=config.mlp_bias)
        self.up = weights.linear(f"{prefix}.mlp.up_proj", hidden, wide, bias=config.mlp_bias)
        self.down = weights.linear(f"{prefix}.mlp.down_proj", wide, hidden, bias=config.mlp_bias)

    def __call__(
        self, x: mx.array, rotate: Rotate, mask: Mask, cache: LayerCache, query_scale: mx.array | None
    ) -> mx.array:
        """`x` [B, L, D] to the same shape."""
        normed = mx.fast.rms_norm(x, self.input_norm, self.eps)
        x = x + self.attention(normed, rotate, mask, cache, query_scale)
        normed = mx.fast.rms_norm(x, self.mlp_norm, self.eps)
        return x + self.down(self.act(self.gate(normed)) * self.up(normed))


class LlamaModel:
    """Embedding, decoder blocks, last norm and head."""

    def __init__(self, config: LlamaConfig, weights: Weights, windows: list[int]) -> None:
        self.config = config
        self.rope = make_rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        scale = config.head_dim**-0.5 * self.rope.softmax_factor
        self.embed = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, weights, i, scale, window) for i, window in enumerate(windows)]
        self.norm = weights.vector("model.norm.weight", config.hidden_size)
        self._head: Linear | None = None
        if not config.tie_word_embeddings:
            self._head = weights.linear("lm_head", config.hidden_size, config.vocab_size)
        self._scaling_beta = float(config.rope_parameters.get("llama_4_scaling_beta", 0.0))
        self._scaling_length = int(config.rope_parameters.get("original_max_position_embeddings", 0))

    def __call__(self, tokens: mx.array, caches: list[LayerCache]) -> mx.array:
        """Final-norm hidden states [B, L, D] of `tokens` [B, L] int32, which follow what is cached."""
        x = self.embed(tokens)
        length, offset = tokens.shape[1], caches[0].offset
        rotate = self.rope.at(max(offset + length, caches[0].planned)).over(offset, length, x.dtype)
        query_scale = self._query_scale(offset, length, x.dtype)
        masks: dict[int, Mask] = {}
        for layer, cache in zip(self.layers, caches, strict=True):
            if layer.window not in masks:
                masks[layer.window] = cache.mask(length)
            x = layer(x, rotate, masks[layer.window], cache, query_scale)
        return mx.fast.rms_norm(x, self.norm, self.config.rms_norm_eps)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of hidden states [..., D]."""
        return self.embed.head(hidden) if self._head is None else self._head(hidden)

    def make_caches(self, length: int = 0) -> list[LayerCache]:
        """Empty caches, one a layer. `length`: tokens known to come (the prompt).

        Rope kinds that depend on the sequence's length (dynamic, longrope) then rotate every chunk of the
        prompt as one pass over all of it would.
        """
        caches: list[LayerCache] = []
        for layer in self.layers:
            cache: LayerCache = RotatingKV(layer.window) if layer.window else FullKV()
            cache.planned = length
            caches.append(cache)
        return caches

    def same_kv(self, length: int, other: int) -> bool:
        """Whether keys cached for a sequence of `length` tokens may be reused in one of `other` tokens."""
        return self.rope.same(length, other)

    def _query_scale(self, offset: int, length: int, dtype: mx.Dtype) -> mx.array | None:
        """Llama 4's scaling of far queries, [L, 1]: 1 + beta log(1 + floor(position / original length))."""
        if not self._scaling_beta or offset + length <= self._scaling_length:
            return None
        steps = [math.log1p(position // self._scaling_length) for position in range(offset, offset + length)]
        return (1 + self._scaling_beta * mx.array(steps, mx.float32))[:, None].astype(dtype)


def build(checkpoint: Checkpoint, weights: Weights) -> LlamaModel:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    try:
        config = msgspec.convert(checkpoint.config, LlamaConfig)
    except msgspec.ValidationError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{checkpoint.path}: config.json: {error}") from None
    if "rope_type" not in config.rope_parameters:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: config.json: a {checkpoint.model_type} model with several rope_parameters",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{checkpoint.path}: config.json: {config.num_attention_heads} attention heads do not divide into "
            f"{config.num_key_value_heads} key-value heads",
        )
    tied = config.tie_word_embeddings
    # Old exports carry rotary tables; tied ones sometimes carry the head that is the embedding again.
    weights.rename(
        lambda name: None if "rotary_emb" in name or (tied and name.startswith("lm_head.")) else name
    )
    windows = [layer.window for layer in kv_layers(checkpoint.config)]
    return LlamaModel(config, weights, windows)
