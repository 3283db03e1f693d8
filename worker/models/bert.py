"""BERT and its relatives RoBERTa and XLM-RoBERTa: encoders, with a classifier of one score where they are rerankers.

Source: transformers 5.24 `modeling_bert.py`, `modeling_roberta.py`, `modeling_xlm_roberta.py`.
"""

from collections.abc import Sequence

import mlx.core as mx
import msgspec

from shared.checkpoint import Checkpoint
from shared.encoders import first_position
from worker.layers.activations import activation
from worker.layers.linear import Linear
from worker.layers.norm import LayerNorm
from worker.models.config import convert
from worker.weights import Weights


class BertConfig(msgspec.Struct, frozen=True):
    """What the graph reads of a normalised config; sizes are counts of values."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str


class Layer:
    """norm(x + attention(x)), then norm(x + mlp(x)): norms behind, with biases."""

    def __init__(self, weights: Weights, config: BertConfig, prefix: str) -> None:
        size, wide, bias = config.hidden_size, config.intermediate_size, True
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.q, self.k, self.v = (
            weights.linear(f"{prefix}.attention.self.{name}", size, size, bias=bias)
            for name in ("query", "key", "value")
        )
        self.o = weights.linear(f"{prefix}.attention.output.dense", size, size, bias=bias)
        self.norm = _norm(weights, config, f"{prefix}.attention.output.LayerNorm")
        self.up = weights.linear(f"{prefix}.intermediate.dense", size, wide, bias=bias)
        self.down = weights.linear(f"{prefix}.output.dense", wide, size, bias=bias)
        self.last_norm = _norm(weights, config, f"{prefix}.output.LayerNorm")
        self.activation = activation(config.hidden_act)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """`x` [B, L, D] to the same shape; `mask` [B, 1, 1, L] is added to the scores."""
        batch, length, size = x.shape
        shape = (batch, length, self.heads, self.head_dim)
        queries, keys, values = (
            part(x).reshape(shape).transpose(0, 2, 1, 3) for part in (self.q, self.k, self.v)
        )
        seen = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask=mask
        )
        x = self.norm(x + self.o(seen.transpose(0, 2, 1, 3).reshape(batch, length, size)))
        return self.last_norm(x + self.down(self.activation(self.up(x))))


class Encoder:
    """A whole encoder. The graph is lazy: whoever reads a value evaluates it."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights, config: BertConfig) -> None:
        size = config.hidden_size
        self.width, self.num_types = size, config.type_vocab_size
        self.first_position = first_position(checkpoint.config)
        self.words = weights.embedding("embeddings.word_embeddings", config.vocab_size, size)
        self.positions = weights.embedding(
            "embeddings.position_embeddings", config.max_position_embeddings, size
        )
        self.types = weights.embedding("embeddings.token_type_embeddings", config.type_vocab_size, size)
        self.norm = _norm(weights, config, "embeddings.LayerNorm")
        self.layers = [
            Layer(weights, config, f"encoder.layer.{number}") for number in range(config.num_hidden_layers)
        ]
        self.classifier: tuple[Linear, Linear] | None = None
        if checkpoint.kind == "reranker":
            first, last = (
                ("pooler.dense", "classifier")
                if checkpoint.model_type == "bert"
                else ("classifier.dense", "classifier.out_proj")
            )
            self.classifier = (
                weights.linear(first, size, size, bias=True),
                weights.linear(last, size, 1, bias=True),
            )

    def __call__(self, ids: mx.array, types: mx.array, lengths: Sequence[int]) -> mx.array:
        """Hidden states [B, L, D] of texts `ids` [B, L] of these lengths, padded on the right with any ids.

        `types` [B, L]: 1 for the second text of a pair. What stands at padding means nothing.
        """
        longest = ids.shape[1]
        places = mx.arange(longest) + self.first_position
        x = self.norm(self.words(ids) + self.types(types) + self.positions(places)[None])
        mask = None
        if min(lengths) < longest:
            is_text = mx.arange(longest)[None] < mx.array(list(lengths))[:, None]
            mask = mx.where(is_text, 0.0, float(mx.finfo(x.dtype).min)).astype(x.dtype)[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def scores(self, hidden: mx.array) -> mx.array:
        """Of a reranker: [B] from hidden states [B, L, D]; the logits, any number."""
        assert self.classifier is not None
        first, last = self.classifier
        return last(mx.tanh(first(hidden[:, 0])))[:, 0]


def build(checkpoint: Checkpoint, weights: Weights) -> Encoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    weights.rename(lambda name: _renamed(name, ranks=checkpoint.kind == "reranker"))
    return Encoder(checkpoint, weights, convert(checkpoint, BertConfig))


def _renamed(name: str, *, ranks: bool) -> str | None:
    """The name in a bare model; None for what is no part of one: heads of pre-training, tables of positions."""
    name = name.removeprefix("bert.").removeprefix("roberta.")
    if name.endswith((".position_ids", ".token_type_ids")) or name.startswith(("cls.", "lm_head.")):
        return None
    if name.startswith(("pooler.", "classifier.")) and not ranks:
        return None
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _norm(weights: Weights, config: BertConfig, name: str) -> LayerNorm:
    size = config.hidden_size
    return LayerNorm(
        weights.vector(f"{name}.weight", size), weights.vector(f"{name}.bias", size), config.layer_norm_eps
    )
