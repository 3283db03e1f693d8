"""Exec in place: the program that we were hands its listener, its lock and the connections on which nothing is under
way to the one that we become. Same pid.

These sockets stay open throughout, so connections and requests wait in the kernel and none is lost. Workers are
adopted by the new image as they are after a kill; only a variable of the environment says what was handed over.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from typing import NoReturn

import msgspec
import psutil

from parent import ports

VARIABLE = "MLXD_HANDOVER"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what the server has handlers of
PREFLIGHT_S = 60.0
MOST_CONNECTIONS = 10_000  # one variable has at most 128 KiB on Linux


class Handover(msgspec.Struct, frozen=True):
    """What the new image finds. `check`: only whether it would start is asked; it leaves before it serves.

    The listener listens on `bound`, where `host` and `port` were asked for. `connections` are its sockets.
    """

    listener: int = -1
    lock: int = -1
    check: bool = False
    host: str = ""
    port: int = 0
    bound: int = 0
    connections: list[int] = []


def received() -> Handover | None:
    """What was handed to this process, once: children must not see it. None where it was started as usual."""
    text = os.environ.pop(VARIABLE, "")
    try:
        given = msgspec.json.decode(text, type=Handover)
    except msgspec.MsgspecError:
        return None
    if given.check or (_is(given.listener, stat.S_ISSOCK) and _is(given.lock, stat.S_ISREG)):
        return given
    return None  # of somebody else's environment


def _is(fd: int, kind: object) -> bool:
    try:
        return bool(kind(os.fstat(fd).st_mode))  # type: ignore[operator]
    except OSError:
        return False


def listener_of(given: Handover) -> ports.Listener:
    """What listens."""
    return ports.Listener(given.host, given.port, _socket_of(given.listener))


def connections_of(given: Handover) -> list[socket.socket]:
    """Of clients; those who have left meanwhile too."""
    return [_socket_of(fd) for fd in given.connections if _is(fd, stat.S_ISSOCK)]


def _socket_of(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def command() -> list[str]:
    """What started us, by our own interpreter."""
    return [sys.executable, *sys.orig_argv[1:]]


async def preflight(listener: ports.Listener, keep_fds: Sequence[int] = ()) -> str:
    """Whether a new image would start: a child gets as far as serving. Why not, in a line; "" = it would."""
    asked = Handover(check=True, host=listener.host, port=listener.port, bound=listener.bound)
    environment = {**os.environ, VARIABLE: msgspec.json.encode(asked).decode()}

    def ask() -> str:
        try:
            child = subprocess.run(
                command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=keep_fds,
                timeout=PREFLIGHT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        said = child.stderr.decode("utf-8", "replace").strip().splitlines() or ["it gave no reason"]
        return said[-1].removeprefix("mlxd: ") if child.returncode else ""

    return await asyncio.to_thread(ask)


def execute(
    listener: ports.Listener, lock: int, connections: Sequence[int] = (), keep_fds: Sequence[int] = ()
) -> NoReturn:
    """Become the new image. Raises OSError where that cannot be; nothing has changed then."""
    handed = Handover(
        listener.socket.fileno(),
        lock,
        host=listener.host,
        port=listener.port,
        bound=listener.bound,
        connections=list(connections[:MOST_CONNECTIONS]),
    )
    given = (handed.listener, lock, *handed.connections, *keep_fds)
    environment = {**os.environ, VARIABLE: msgspec.json.encode(handed).decode()}
    for fd in given:
        os.set_inheritable(fd, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they wait until the new image has handlers
    try:
        os.execve(sys.executable, command(), environment)
    finally:  # only where it failed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for fd in given:
            os.set_inheritable(fd, False)


def reap_strangers(known: Collection[int]) -> None:
    """Children of the program that we were, except those of `known`, are of no use: reap each when it ends."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid not in known:
                threading.Thread(target=_reap, args=(child.pid,), daemon=True).start()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
