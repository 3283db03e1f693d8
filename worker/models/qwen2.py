"""Qwen2 and 2.5: llama with biases on queries, keys and values. Source: transformers 5.24 `modeling_qwen2.py`."""

from shared.checkpoint import Checkpoint
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import LlamaConfig, dense
from worker.weights import Weights


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, LlamaConfig), checkpoint)
    return dense(checkpoint, weights, config, qkv_bias=True)
