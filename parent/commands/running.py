"""The server that runs on a data folder, if one does: found through its lock file, asked over HTTP."""

import os
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from shared.errors import ErrorCode, refuse


class Running(msgspec.Struct, frozen=True):
    """The content of `mlxd.lock`."""

    pid: int
    url: str


def find_running(data_dir: Path) -> Running | None:
    """The live server of this data folder; None when the lock file is absent or its owner is gone."""
    try:
        found = msgspec.json.decode((data_dir / "mlxd.lock").read_bytes(), type=Running)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if _is_alive(found.pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def engine_state(running: Running) -> dict[str, Any]:
    """`GET /engine` of the server. Raises `Refused` when it does not answer."""
    try:
        with httpx2.Client(trust_env=False, timeout=5.0) as client:
            answer = client.get(f"{running.url}/engine")
            answer.raise_for_status()
            state = msgspec.json.decode(answer.content)
    except (httpx2.HTTPError, msgspec.MsgspecError) as error:
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"the server at {running.url} (pid {running.pid}) does not answer: {error}",
        ) from None
    return state if isinstance(state, dict) else {}


def require_not_served(data_dir: Path, folder: Path, model_id: str) -> None:
    """Raises `Refused` when a running server serves this model folder."""
    running = find_running(data_dir)
    if running is None:
        return
    model = engine_state(running).get("model") or {}
    if Path(str(model.get("path", ""))) == folder:
        raise refuse(
            ErrorCode.FORBIDDEN,
            f"{model_id} is being served at {running.url} (pid {running.pid}); stop that server first",
        )
