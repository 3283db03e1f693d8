"""Which provider serves a model: decided by its config and the setting, before any weight is opened."""

import sys
from collections.abc import Collection

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, Refused, refuse
from shared.providers import INSTALL, PROVIDERS, mlx_lm_has, mlx_lm_version


def choose_provider(checkpoint: Checkpoint, asked: str, native: Collection[str]) -> str:
    """`native` or `mlx-lm`. `native`: the `model_type`s that are ours. Raises `Refused` (invalid_request, unsupported).

    A provider that is asked for is the one, or an error says what it lacks; there is no falling back to another.
    """
    if asked not in PROVIDERS:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"provider {asked!r} is not known; choose {', '.join(PROVIDERS)}",
            param="provider",
        )
    family, version = checkpoint.model_type, mlx_lm_version()
    if asked in ("auto", "native") and family in native:
        return "native"
    ours = f"{checkpoint.path}: model family {family!r} is not among the native ones ({', '.join(native)})"
    if asked == "native":
        more = "; choose provider mlx-lm, which has it" if mlx_lm_has(family) else ""
        raise _unsupported(f"{ours}, which provider native asks for{more}")
    if not version:
        reason = (
            "provider mlx-lm is asked for, but mlx-lm" if asked == "mlx-lm" else "mlx-lm, which serves it,"
        )
        if mlx_lm_has(family):
            start = f"{checkpoint.path}: " if asked == "mlx-lm" else f"{ours}, and "
            raise _unsupported(f"{start}{reason} is not installed beside {sys.executable}; {INSTALL}")
        raise _unsupported(f"{ours}, and mlx-lm is not known to have it")
    if not mlx_lm_has(family):
        raise _unsupported(f"{ours}, and mlx-lm {version} has no mlx_lm/models/{family}.py")
    return "mlx-lm"


def _unsupported(problem: str) -> Refused:
    return refuse(ErrorCode.UNSUPPORTED, problem, param="provider")
