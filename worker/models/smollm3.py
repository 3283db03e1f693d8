"""SmolLM3: llama where every fourth layer does not rotate. Source: transformers 5.24 `modeling_smollm3.py`."""

from shared.checkpoint import Checkpoint
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import LlamaConfig, dense
from worker.weights import Weights


class SmolLM3Config(LlamaConfig, frozen=True, kw_only=True):
    """`no_rope_layers`: 1 for a layer that rotates, in spite of its name; 0 for one that does not."""

    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] = ()
    no_rope_layer_interval: int = 4


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, SmolLM3Config), checkpoint)
    listed, bias = config.no_rope_layers, config.attention_bias

    def rotates(index: int) -> bool:
        return bool(listed[index]) if listed else (index + 1) % config.no_rope_layer_interval != 0

    return dense(checkpoint, weights, config, qkv_bias=bias, o_bias=bias, rotates=rotates)
