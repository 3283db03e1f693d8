"""Qwen3: llama with norms over each head of queries and keys. Source: transformers 5.24 `modeling_qwen3.py`."""

from shared.checkpoint import Checkpoint
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import LlamaConfig, dense
from worker.weights import Weights


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, LlamaConfig), checkpoint)
    bias = config.attention_bias
    return dense(checkpoint, weights, config, qkv_bias=bias, o_bias=bias, head_norms=True)
