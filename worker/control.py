"""The worker's end of the control channel: a thread that reads, a lock around writing.

Reading has its own thread, so that the end of the parent is noticed while the event loop is busy. A worker
then waits a while for a new parent (`adoption`), who gets the channel if he knows the nonce of the launch record.
"""

import array
import contextlib
import ctypes
import faulthandler
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from shared import ndjson
from shared.control import Adopt, FromWorker, Hello, Progress, ToWorker
from shared.logs import event
from shared.version import VERSION, WIRE

log = logging.getLogger("control")

_decoder = msgspec.json.Decoder(ToWorker)
_decode_adopt = msgspec.json.Decoder(Adopt).decode
_PR_SET_PDEATHSIG = 1
PROGRESS_S = 0.1
INTRODUCTION_S = 2.0  # for whoever connects to say who he is
MAX_INTRODUCTION = 4096
STUCK_S = 120.0  # after which an interpreter that runs no Python any more ends itself
GUARD_S = 5.0


class Control:
    """Speaks NDJSON over an inherited socket. `send` may be called from any thread."""

    def __init__(self, fd: int, adopt_fd: int = -1) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._adopt = socket.socket(fileno=adopt_fd) if adopt_fd >= 0 else None
        self._nonce, self._grace_s = "", 0.0
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
                    event(log, "control.unknown_message", level=logging.WARNING, error=str(error))
            try:
                chunk = self._socket.recv(65536)
            except OSError:
                return None
            if not chunk:
                return None
            self._queue += self._lines.feed(chunk)

    def listen(
        self,
        on_message: Callable[[ToWorker], None],
        on_gone: Callable[[], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Read in a thread of its own until the parent is gone (`on_lost`), and no other came (`on_gone`). A new one's
        `Adopt` is passed on too: he has been told `Hello` and waits for `Ready`.
        """

        def read() -> None:
            while True:
                while (message := self.receive()) is not None:
                    on_message(message)
                on_lost()
                adopt = self._adopted()
                if adopt is None:
                    break
                on_message(adopt)
            on_gone()

        threading.Thread(target=read, name="control", daemon=True).start()

    def may_be_adopted(self, nonce: str, grace_s: float) -> None:
        """From now on the end of the parent is survived for `grace_s`, and whoever knows the nonce takes over."""
        if self._adopt is not None and nonce and grace_s > 0:
            wake_with_parent()
            self._nonce, self._grace_s = nonce, grace_s

    def _adopted(self) -> Adopt | None:
        """Wait for a new parent; None where none came in time."""
        until = time.monotonic() + self._grace_s
        if self._adopt is None or not self._grace_s:
            return None
        with open(os.devnull, "wb") as nowhere:
            _print_to(
                nowhere.fileno()
            )  # the pipe's reader is gone, and a full or broken pipe must not matter
        while (left_s := until - time.monotonic()) > 0:
            self._adopt.settimeout(left_s)
            try:
                end, _ = self._adopt.accept()
            except OSError:  # also the time-out
                continue
            adopt = self._introduction(end)
            if adopt is not None:
                with self._lock:
                    self._socket.close()
                    self._socket, self._lines, self._queue = end, ndjson.Lines(), []
                self.hello(os.getpid())
                return adopt
            end.close()
        return None

    def _introduction(self, end: socket.socket) -> Adopt | None:
        """What the one who connected says, if it is right. He may hand over where our output is to go."""
        until = time.monotonic() + INTRODUCTION_S
        said, fds = b"", array.array("i")
        try:
            while not said.endswith(b"\n") and len(said) < MAX_INTRODUCTION:
                end.settimeout(max(0.001, until - time.monotonic()))
                part, received, _, _ = socket.recv_fds(end, MAX_INTRODUCTION, 4)
                fds.extend(received)
                if not part:
                    return None
                said += part
            adopt = _decode_adopt(said)
            right = hmac.compare_digest(adopt.nonce.encode(), self._nonce.encode())
            if not right or adopt.wire != WIRE:
                return None
            if fds:
                _print_to(fds[0])
            end.settimeout(None)
            return adopt
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            for fd in fds:
                os.close(fd)


def _print_to(fd: int) -> None:
    """Let stdout and stderr go there."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in (1, 2):
        os.dup2(fd, number)


def guard(stuck_s: float = STUCK_S, every_s: float = GUARD_S) -> None:
    """From now on an interpreter that can run no Python any more (a lock that native code never gives back) ends
    itself, stacks first: nobody else would, if its parent is gone too.
    """

    def arm() -> None:
        while True:
            faulthandler.dump_traceback_later(stuck_s, exit=True)
            time.sleep(every_s)

    threading.Thread(target=arm, name="guard", daemon=True).start()


def die_with_parent() -> None:
    """Linux: let the kernel kill this process with its parent, for the case that it cannot read (stopped)."""
    _at_the_parents_end(signal.SIGKILL)


def wake_with_parent() -> None:
    """Linux: let the kernel wake this process at its parent's end, so that a stopped one can notice it."""
    _at_the_parents_end(signal.SIGCONT)


def _at_the_parents_end(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
