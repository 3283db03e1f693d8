"""Binding the TCP port, and naming who has it when it is taken."""

import errno
import os
import shutil
import socket
import subprocess
from pathlib import Path

from shared.errors import ErrorCode, Refused, refuse

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `Refused` naming the owner of a taken port where the OS tells."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise refuse(ErrorCode.INVALID_REQUEST, f"cannot listen on {host!r}: {error}", param="host") from None
    family, kind, protocol, _, address = found[0]
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise refuse(ErrorCode.FORBIDDEN, _why_not(host, port, error), param="host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise refuse(ErrorCode.FORBIDDEN, _why_not(host, port, error), param="port") from None
    return listener


class Listener:
    """The listening socket, and what was asked for: `port` 0 stays 0. `waiting`: clients of a place it has left."""

    def __init__(self, host: str, port: int, listening: socket.socket | None = None) -> None:
        self.host, self.port = host, port
        self.socket = listening or bind(host, port)
        self.waiting: list[socket.socket] = []

    @property
    def bound(self) -> int:
        """The port that it has got."""
        return int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address to open."""
        return url_of(self.socket, self.host)

    def close(self) -> None:
        """Refuse who comes."""
        self.socket.close()

    def move(self, host: str, port: int) -> None:
        """Listen there instead; who has come to the old place waits in `waiting`.

        Raises `Refused` where that cannot be; it listens where it was then.
        """
        try:
            new = bind(host, port)
        except Refused:
            if port != self.bound:
                raise
            new = self._beside(host, port)  # what stands in the way may be ourselves
        else:
            self._take_waiting()
            self.socket.close()
        self.socket, self.host, self.port = new, host, port

    def _beside(self, host: str, port: int) -> socket.socket:
        """Another address of the same port: only one of the two can be had at a time."""
        self._take_waiting()
        bound = self.bound
        self.socket.close()
        try:
            return bind(host, port)
        except Refused:
            self.socket = bind(self.host, bound)
            raise

    def _take_waiting(self) -> None:
        self.socket.setblocking(False)
        while True:
            try:
                self.waiting.append(self.socket.accept()[0])
            except ConnectionAbortedError:
                continue
            except OSError:  # nobody else
                return


def try_move(host: str, port: int, bound: int) -> None:
    """Raises `Refused` where a listener of the port `bound` could not move there, as far as that can be tried."""
    bind(host, 0 if port == bound else port).close()


def url_of(listener: socket.socket, host: str) -> str:
    """The address to open: loopback's name for a wildcard."""
    port = listener.getsockname()[1]
    shown = "localhost" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        by = f" by {owner}" if owner else ""
        return f"port {port} on {host} is taken{by}; stop that, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
    return f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host or --port"


def owner_of(port: int) -> str | None:
    """`process 123 (python3)` of the listener on a port; None where the OS does not tell."""
    if Path("/proc/net/tcp").exists():
        return _owner_by_proc(port)
    return _owner_by_lsof(port)


def _owner_by_proc(port: int) -> str | None:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A = listening
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return f"process {process.name} ({_name(process)})"
    return None


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir())
    except OSError:  # ended meanwhile, or another user's
        return False


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"


def _owner_by_lsof(port: int) -> str | None:
    lsof = shutil.which("lsof")
    if lsof is None:
        return None
    command = [lsof, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = {line[:1]: line[1:] for line in reversed(said.splitlines())}
    return f"process {fields['p']} ({fields.get('c', '?')})" if "p" in fields else None
