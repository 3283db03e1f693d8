"""The Popen-shaped seam: runtime folder, bound socket, spawn in an own session, signal the group, wait.

The parent binds and listens, the worker inherits: no stale-socket race, no readiness race, and a connection
is refused at once after a death. stdout and stderr of a worker end in a bounded ring of lines.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

RING_LINES = 200
TAIL_LINES = 12


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


class Process:
    """A spawned worker: its pid, its output ring, its end. Made by `start`."""

    def __init__(self, popen: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self.pid = popen.pid
        self.lines: deque[str] = deque(maxlen=RING_LINES)
        self.exited: asyncio.Future[int] = loop.create_future()
        self._output_ended = asyncio.Event()
        self._popen = popen
        self._loop = loop
        for work, name in ((self._wait, "wait"), (self._read, "output")):
            threading.Thread(target=work, name=f"worker-{self.pid}-{name}", daemon=True).start()

    def _wait(self) -> None:
        code = self._popen.wait()
        self._tell(lambda: self.exited.set_result(code))

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as output:
            while line := output.readline(4096):
                self.lines.append(line.decode("utf-8", "replace").rstrip())
        self._tell(self._output_ended.set)

    def _tell(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback)

    async def output_ended(self, timeout_s: float) -> None:
        """Wait for the last lines; a grandchild that holds the pipe open is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._output_ended.wait()

    def tail(self) -> list[str]:
        """The last lines of output."""
        return list(self.lines)[-TAIL_LINES:]

    def signal(self, number: signal.Signals) -> None:
        """To the whole group (its session is its own); a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def start(
    command: Sequence[str], *, environment: dict[str, str], socket_path: Path | None
) -> tuple[Process, socket.socket]:
    """Start a worker that inherits its ends of both channels (without `socket_path` only the control channel).

    Returns it and our end of its control channel. Raises OSError when it cannot be started. Call it on the
    event loop.
    """
    with contextlib.ExitStack() as on_failure:
        ours, theirs = socket.socketpair()
        on_failure.callback(ours.close)
        with contextlib.ExitStack() as theirs_only:
            inherited = [theirs_only.enter_context(theirs)]
            if socket_path is not None:
                inherited.append(theirs_only.enter_context(bind_socket(socket_path)))
            numbers = [end.fileno() for end in inherited]
            data_fd = numbers[1] if socket_path is not None else -1
            popen = subprocess.Popen(
                [*command, "--control-fd", str(numbers[0]), "--data-fd", str(data_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=numbers,
                start_new_session=True,
            )
        on_failure.pop_all()
    return Process(popen, asyncio.get_running_loop()), ours


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
        return "could not be started"
    return f"left with exit code {code}" if code >= 0 else f"was killed by {signal_name(code)}"
