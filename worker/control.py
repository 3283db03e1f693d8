"""The worker's end of the control channel: a thread that reads, a lock around writing.

Reading has its own thread, so that the end of the parent is noticed while the event loop is busy.
"""

import ctypes
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from shared import ndjson
from shared.control import FromWorker, Hello, Progress, ToWorker
from shared.version import VERSION, WIRE

_decoder = msgspec.json.Decoder(ToWorker)
_PR_SET_PDEATHSIG = 1
PROGRESS_S = 0.1


class Control:
    """Speaks NDJSON over an inherited socket. `send` may be called from any thread."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._lock = threading.Lock()
        self._lines = ndjson.Lines()
        self._queue: list[bytes] = []
        self._told_at = 0.0

    def hello(self, pid: int) -> None:
        self.send(Hello(WIRE, VERSION, pid))

    def send(self, message: FromWorker) -> None:
        """A parent that is gone is noticed by the reader, not here."""
        data = ndjson.encode(message)
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tell the parent about loading, a few times a second at most."""
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_S or done >= total:
            self._told_at = now
            self.send(Progress(stage, done, total))

    def receive(self) -> ToWorker | None:
        """The next message; None at the end of file. A message of an unknown type is passed over."""
        while True:
            while self._queue:
                line = self._queue.pop(0)
                try:
                    return _decoder.decode(line)
                except msgspec.ValidationError as error:
                    print(f"control: unknown message passed over: {error}", file=sys.stderr)
            try:
                chunk = self._socket.recv(65536)
            except OSError:
                return None
            if not chunk:
                return None
            self._queue += self._lines.feed(chunk)

    def listen(self, on_message: Callable[[ToWorker], None], on_gone: Callable[[], None]) -> None:
        """Read in a thread of its own until the parent is gone."""

        def read() -> None:
            while (message := self.receive()) is not None:
                on_message(message)
            on_gone()

        threading.Thread(target=read, name="control", daemon=True).start()


def die_with_parent() -> None:
    """Linux: let the kernel kill this process with its parent, for the case that it cannot read (stopped)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
