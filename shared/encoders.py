"""Models that do not answer but say what a text means, or how well it answers a question: which they are. Pure.

An encoder reads a text as a whole: no KV cache, no next token. Decoders that were trained for vectors are told by the
`modules.json` that sentence-transformers puts beside them.
"""

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["chat", "embedding", "reranker"]
"""What a model was made for: to write, to give vectors, to score a document for a query."""

ENCODERS = ("bert", "roberta", "xlm-roberta")
"""`model_type`s of encoders."""

FORWARD_CPU, FORWARD_GPU = 1024, 16384
"""Tokens of one forward of an encoder, padding included; a longer text is one by itself."""

ABILITIES: Mapping[Kind, str] = {
    "chat": "writes text (POST /v1/chat/completions)",
    "embedding": "gives vectors (POST /v1/embeddings)",
    "reranker": "scores documents (POST /v1/rerank)",
}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Of a normalised config."""
    return config.get("model_type") in ENCODERS


def kind_of(config: Mapping[str, Any], *, has_modules: bool) -> Kind:
    """What the model was made for. `has_modules`: sentence-transformers' `modules.json` is there."""
    if is_encoder(config):
        names = config.get("architectures") or []
        return (
            "reranker"
            if any(str(name).endswith("ForSequenceClassification") for name in names)
            else "embedding"
        )
    return "embedding" if has_modules else "chat"


def encoder_context(config: Mapping[str, Any]) -> int:
    """Tokens that an encoder can read at once: RoBERTa counts its positions from the one after padding."""
    positions = config.get("max_position_embeddings", 0)
    if not isinstance(positions, int):
        return 0
    return max(0, positions - first_position(config))


def first_position(config: Mapping[str, Any]) -> int:
    """The position of the first token."""
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) else 1) + 1 if config.get("model_type") != "bert" else 0


def encoder_fault(config: Mapping[str, Any]) -> str:
    """Why an encoder cannot be served, naming the key; "" where it can."""
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        return f"position_embedding_type {positions!r} is not supported; only absolute positions are"
    if kind_of(config, has_modules=False) == "reranker" and (labels := num_labels(config)) != 1:
        return f"it sorts texts into {labels} classes; only models with one score (num_labels 1) are served"
    if config.get("is_decoder") or config.get("add_cross_attention"):
        return "is_decoder is set, and as a decoder this family is not supported"
    return ""


def decoder_fault(config: Mapping[str, Any]) -> str:
    """Why a decoder that gives vectors would give wrong ones here: its tokens see those behind them; "" where not."""
    if config.get("is_causal") is False:
        return "is_causal is false, and a decoder is only served as one that looks back"
    return ""


def num_labels(config: Mapping[str, Any]) -> int:
    """Scores that a classifier gives; transformers assumes two."""
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    count = config.get("num_labels", 2)
    return count if isinstance(count, int) else 2
