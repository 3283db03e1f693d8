"""GLM-4.5 to 4.7: experts routed as in DeepSeek-V3. Source: transformers 5.24 `modeling_glm4_moe.py`."""

from shared.checkpoint import Checkpoint
from worker.models.config import checked, convert
from worker.models.decoder import Decoder
from worker.models.llama import Mlp, dense, gated_mlp
from worker.models.moe import RoutedConfig, drop_prediction_layers, routed_mlp
from worker.weights import Weights


class Glm4MoeConfig(RoutedConfig, frozen=True, kw_only=True):
    """Whether heads of queries and keys are normed."""

    use_qk_norm: bool = False


def build(checkpoint: Checkpoint, weights: Weights) -> Decoder:
    """The graph over the checkpoint's weights. Raises `Refused` (bad_checkpoint, unsupported)."""
    config = checked(convert(checkpoint, Glm4MoeConfig), checkpoint)
    drop_prediction_layers(weights, config)

    def mlp(index: int, prefix: str) -> Mlp:
        if config.is_sparse(index):
            return routed_mlp(weights, config, prefix)
        return gated_mlp(weights, config, prefix, config.intermediate_size)

    return dense(
        checkpoint,
        weights,
        config,
        qkv_bias=config.attention_bias,
        head_norms=config.use_qk_norm,
        mlp=mlp,
    )
