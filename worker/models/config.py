"""Reading a family's config into its struct, with refusals that name the key."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse

T = TypeVar("T")


def convert(checkpoint: Checkpoint, kind: type[T]) -> T:
    """The normalised config as a family's struct. Raises `Refused` (bad_checkpoint)."""
    try:
        return msgspec.convert(checkpoint.config, kind)
    except msgspec.ValidationError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{checkpoint.path}: config.json: {error}") from None


def checked(config: Any, checkpoint: Checkpoint) -> Any:
    """The same config if its heads divide into its key-value heads. Raises `Refused` (bad_checkpoint)."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{checkpoint.path}: config.json: {config.num_attention_heads} attention heads do not divide into "
            f"{config.num_key_value_heads} key-value heads",
        )
    return config


def has_one_rope(checkpoint: Checkpoint, rope: dict[str, Any]) -> None:
    """Refuses (unsupported) a config with a rotation for each kind of layer, where the family has but one."""
    if "rope_type" not in rope:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{checkpoint.path}: config.json: a {checkpoint.model_type} model with several rope_parameters",
        )


def ropes_by_kind(
    checkpoint: Checkpoint, rope: dict[str, Any], kinds: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The rotation of each kind of layer that there is. Raises `Refused` (bad_checkpoint) where one is missing."""
    for kind in dict.fromkeys(kinds):
        if not isinstance(rope.get(kind), dict):
            raise refuse(
                ErrorCode.BAD_CHECKPOINT,
                f"{checkpoint.path}: config.json: no rope_parameters for layers of {kind}",
            )
    return {kind: rope[kind] for kind in dict.fromkeys(kinds)}
