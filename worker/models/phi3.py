"""Phi-3 and Phi-4-mini: llama with fused projections. Source: transformers 5.24 `modeling_phi3.py`."""

from shared.checkpoint import Checkpoint
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import LlamaConfig, dense
from worker.weights import Weights


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, LlamaConfig), checkpoint)
    queries = config.num_attention_heads * config.head_dim
    keys, wide = config.num_key_value_heads * config.head_dim, config.intermediate_size
    for index in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        weights.split(
            f"{attention}.qkv_proj",
            {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys},
        )
        weights.split(f"{mlp}.gate_up_proj", {f"{mlp}.gate_proj": wide, f"{mlp}.up_proj": wide})
    return dense(checkpoint, weights, config)
