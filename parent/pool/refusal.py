"""Why a request for a model cannot be served and should not wait either."""

import time

from parent.library.catalog import ModelEntry
from parent.pool.models import Choice
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared.encoders import ABILITIES
from shared.errors import ErrorCode, Failure, Refused, refuse


def refusal(supervisor: Supervisor) -> Failure | None:
    """The recorded reason of a failed or exhausted worker, for a client; None = wait for it."""
    life, model_id = supervisor.life, supervisor.launch.model_id
    if life.state is State.FAILED and life.permanent is not None:
        # `unsupported` of a request is the client's fault; of a model directory it is not.
        code = life.permanent.code
        code = ErrorCode.BAD_CHECKPOINT if code is ErrorCode.UNSUPPORTED else code
        return Failure(code, f"{model_id} cannot be served: {life.permanent.message}")
    if life.state is State.EXHAUSTED:
        reason = supervisor.last_exit.reason if supervisor.last_exit else "its worker keeps dying"
        return Failure(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"the worker of {model_id} died too often and is not restarted for now ({reason}); "
            f"try again later or POST /admin/workers/{model_id}/restart",
            retry_after_s=max(1.0, life.half_open_at - time.monotonic()),
        )
    return None


def without_adapters(choice: Choice) -> None:
    """Raises `Refused` where a name asks for adapters, for what runs without."""
    if choice.adapters:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"vectors are made without adapters; ask for {choice.entry.id} alone",
            param="model",
        )


def not_for(entry: ModelEntry, why: str) -> Refused:
    """The refusal of a request that the model was not made for, with what it can do."""
    return refuse(ErrorCode.UNSUPPORTED, f"{entry.id} {ABILITIES[entry.kind]}, {why}", param="model")
