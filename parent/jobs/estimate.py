"""What a job will hold of the memory, by formula, before anything of it is loaded: what it is charged with. Pure.

Errs on the safe side: terms are those of float32, as mlx's CPU backend computes, where nothing else is known.
"""

from collections.abc import Mapping
from typing import Any

from shared.lab import Finetune, Quantize

FLOAT = 4
MOMENTS = 4  # of each trained value: itself, its gradient, two moments
CALIBRATION_ROWS = 1
LAYERS_AT_ONCE = 3  # of a quantization: as it comes, in float32, as it goes
BASE_BYTES = 256 << 20  # interpreter, mlx, tokenizer, data


def finetune(spec: Finetune, weights: int, config: Mapping[str, Any]) -> int:
    """Weights, what is trained, and what one batch keeps for its way back. `weights`: bytes once loaded."""
    if not config:
        return weights + BASE_BYTES
    hidden, inner = int(config["hidden_size"]), int(config.get("intermediate_size") or 0)
    layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
    heads = int(config.get("num_attention_heads") or 1)
    trained = layers if spec.num_layers < 0 else min(layers, spec.num_layers)
    # Seven projections between the stream and something as wide as it, or as the MLP.
    values = trained * spec.rank * (4 * 2 * hidden + 3 * (hidden + inner))
    rows = spec.batch_size * (2 if spec.method != "sft" else 1)
    tokens = rows * spec.max_seq_length
    scores = rows * heads * spec.max_seq_length**2
    layer = tokens * (12 * hidden + 5 * inner) + 2 * scores
    if spec.grad_checkpoint:
        kept = layers * tokens * hidden + layer
    elif spec.segment_size:
        kept = layers * tokens * hidden // spec.segment_size + spec.segment_size * layer
    else:
        kept = trained * layer
    logits = 3 * min(spec.head_chunk or tokens, tokens) * vocab
    return weights + BASE_BYTES + FLOAT * (MOMENTS * values + kept + logits)


def quantize(spec: Quantize, weights: int, stored: int, config: Mapping[str, Any]) -> int:
    """One shard and one layer; the whole model too, where it is run: to find out which bits matter, or to measure.

    `stored`: bytes on disk.
    """
    layers = int(config.get("num_hidden_layers") or 1)
    shard = min(stored, 5 << 30)  # what tools write at most into one file
    least = shard + LAYERS_AT_ONCE * (weights // layers) + BASE_BYTES
    if spec.target_bpw is None and not spec.measure:
        return least
    hidden, vocab = int(config.get("hidden_size") or 0), int(config.get("vocab_size") or 0)
    tokens = spec.calibration_tokens * CALIBRATION_ROWS
    return max(least, weights + BASE_BYTES + FLOAT * tokens * (20 * hidden + 3 * vocab))
