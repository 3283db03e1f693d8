"""The text model inside a multimodal checkpoint: one spelling of its names, and what is not its own.

Three spellings are in the wild, told apart by what is there: `model.language_model.layers` with `lm_head` (transformers
5), `language_model.model.layers` with `language_model.lm_head` (transformers 4, MLX), `model.layers` (text only).
"""

from worker.weights import Weights

TOWERS = (
    "vision_tower.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "visual.",
)
"""How names of everything but text begin once `unwrap` has been there: `vision_tower.` and so on, whatever was
around them."""


def unwrap(weights: Weights) -> None:
    """Text under `model.` and `lm_head.`, every tower under its own name."""
    weights.rename(_plain)


def drop(weights: Weights, *beginnings: str) -> None:
    """Leave out tensors whose names begin so: parts of the checkpoint that nobody here runs."""
    weights.rename(lambda name: None if name.startswith(beginnings) else name)


def _plain(name: str) -> str:
    for inside, outside in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(inside):
            return outside + name.removeprefix(inside)
    bare = name.removeprefix("model.")
    return bare if bare.startswith(TOWERS) else name
