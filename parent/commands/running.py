"""The server that runs on a data folder, if one does: found through its lock file, asked over HTTP."""

import fcntl
import os
from pathlib import Path
from typing import IO, Any

import httpx2
import msgspec

from parent import keys
from shared.errors import ErrorCode, refuse


class Running(msgspec.Struct, frozen=True):
    """The content of `mlxd.lock`, and the key that commands here have ("" = none is needed)."""

    pid: int
    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What every question sends along."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def find_running(data_dir: Path) -> Running | None:
    """The live server of this data folder; None when nobody holds the lock, whatever the file says.

    A process of that number proves nothing, numbers are given out again; the lock dies with its holder.
    """
    try:
        with open(data_dir / "mlxd.lock", "rb") as file:
            found = msgspec.json.decode(file.read(), type=Running)
            # The number first: a server that starts just now must not find the lock in our hands for nothing.
            if not _is_alive(found.pid) or not _is_held(file):
                return None
        return msgspec.structs.replace(found, key=keys.local_key(data_dir))
    except (OSError, msgspec.MsgspecError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return pid > 0


def _is_held(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def require_running(data_dir: Path) -> Running:
    """The live server of this data folder. Raises `Refused` where there is none."""
    running = find_running(data_dir)
    if running is None or not running.url:
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE, f"no server runs on {data_dir}; start one with `mlxd serve`"
        )
    return running


def call(running: Running, method: str, path: str, body: Any = None, timeout_s: float | None = 5.0) -> Any:
    """The server's answer as JSON. Raises `Refused` with its own reason, or when it does not answer."""
    content = None if body is None else msgspec.json.encode(body)
    try:
        with httpx2.Client(trust_env=False, timeout=timeout_s, headers=running.headers) as client:
            answer = client.request(method, f"{running.url}{path}", content=content)
        found = msgspec.json.decode(answer.content)
    except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError) as error:
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"the server at {running.url} (pid {running.pid}) does not answer: {error}; "
            "wait until it is up, or stop it",
        ) from None
    if answer.is_error:
        told = found.get("error") if isinstance(found, dict) else None
        said = told.get("message") if isinstance(told, dict) else f"status {answer.status_code}"
        raise refuse(ErrorCode.CONFLICT, str(said))
    return found


def engine_state(running: Running) -> dict[str, Any]:
    """`GET /engine` of the server. Raises `Refused` when it does not answer."""
    state = call(running, "GET", "/engine")
    return state if isinstance(state, dict) else {}


def require_not_served(data_dir: Path, folder: Path, model_id: str) -> None:
    """Raises `Refused` when a running server has this model folder in memory."""
    running = find_running(data_dir)
    if running is None:
        return
    for row in engine_state(running).get("workers") or []:
        if Path(str(row.get("path", ""))) == folder and row.get("phase") != "absent":
            raise refuse(
                ErrorCode.FORBIDDEN,
                f"{model_id} is in memory at {running.url} (pid {running.pid}); `mlxd unload {model_id}` first",
            )
