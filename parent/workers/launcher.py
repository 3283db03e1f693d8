"""The start of a worker: bound sockets, spawn in an own session; and the words for how one ends.

The parent binds and listens, the worker inherits: no stale-socket race, no readiness race, and a connection
is refused at once after a death. A model worker inherits two sockets: that of its requests, and the one at which a
later parent adopts it. stdout and stderr of a worker end in a bounded ring of lines, and what of it is its log in ours.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from parent.workers.process import Process, child
from parent.workers.relay import Relay


def default_command() -> list[str]:
    """`-P`: a folder `worker/` in the user's working directory must not be imported instead of ours."""
    return [sys.executable, "-P", "-m", "worker"]


def worker_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our environment with `extra`; from a checkout, with its root on PYTHONPATH, as `-P` hides it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    root = Path(__file__).resolve().parents[2]
    if root not in {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else str(root)
    return {**environment, **extra}


def bind_socket(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, mode 0600. The worker gets it by inheritance."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def remove_socket(path: str) -> None:
    """Unlink the socket of a worker that is gone; "" = it had none."""
    if path:
        Path(path).unlink(missing_ok=True)


class LastExit(msgspec.Struct, frozen=True):
    """How a worker's process ended. `signal` is its name, "" where it left by itself."""

    code: int | None
    signal: str
    reason: str
    stderr: list[str]
    epoch: int


def start(
    command: Sequence[str],
    *,
    environment: dict[str, str],
    socket_path: Path | None,
    adopt_path: Path | None = None,
    ids: dict[str, str] | None = None,
    clean: Callable[[str], str] = str,
) -> tuple[Process, socket.socket]:
    """Start a worker that inherits its end of the control channel and the listeners of these paths, if any.

    `ids`: of what it logs, beside its pid; `clean`: see `Relay`.
    Returns it and our end of its control channel. Raises OSError when it cannot be started. Call it on the
    event loop.
    """
    with contextlib.ExitStack() as on_failure:
        ours, theirs = socket.socketpair()
        on_failure.callback(ours.close)
        with contextlib.ExitStack() as theirs_only:
            inherited = [theirs_only.enter_context(theirs)]
            flags = ["--control-fd", str(theirs.fileno())]
            for flag, path in (("--data-fd", socket_path), ("--adopt-fd", adopt_path)):
                if path is None:
                    flags += [flag, "-1"]
                    continue
                listener = theirs_only.enter_context(bind_socket(path))
                on_failure.callback(remove_socket, str(path))
                inherited.append(listener)
                flags += [flag, str(listener.fileno())]
            popen = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[end.fileno() for end in inherited],
                start_new_session=True,
            )
        on_failure.pop_all()
    process = child(popen, Relay({**(ids or {}), "pid": popen.pid}, clean))
    assert popen.stdout is not None
    popen.stdout.close()
    return process, ours


def signal_name(code: int | None) -> str:
    """`SIGKILL` of an exit code -9, "" where the process left by itself."""
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def describe_exit(code: int | None) -> str:
    """`was killed by SIGKILL`, `left with exit code 5`, for a person."""
    if code is None:
        return "ended, and its exit code is not known"
    return f"left with exit code {code}" if code >= 0 else f"was killed by {signal_name(code)}"
