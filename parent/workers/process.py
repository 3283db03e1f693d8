"""One process of a worker: its output, its end, signals to its group. A child of ours, or one that was adopted.

A process number is given out again, so whoever wants to signal a process that he has only read of asks `is_same`
first: the number and the moment at which the process began.
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

from parent.workers.relay import Lines, Relay

RING_LINES = 200
TAIL_LINES = 12
MAX_LINE = 4096  # characters kept of one line in the ring
_CHUNK = 65536
_FLOOD_S = 0.005  # between two full chunks: a worker that floods its output must not take the parent's time
_POLL_S = 0.05
_SAME_S = 0.05  # psutil counts in clock ticks of 10 ms


def started_at(pid: int) -> float:
    """When the process began, in seconds of the system's clock; 0 where it has ended."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.Error, OverflowError, ValueError):
        return 0.0


def is_same(pid: int, began: float) -> bool:
    """Whether the process `pid` lives and is the one that began then."""
    found = started_at(pid)
    return found > 0 and abs(found - began) < _SAME_S


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped the process (SIGSTOP), and it waits for SIGCONT."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class Process:
    """A worker's process. `wait` blocks until it has ended and gives its exit code, None where nobody knows.

    `output` is a file descriptor with what it prints, taken over; what of it is its log goes to `log`. Make it on the
    event loop.
    """

    def __init__(self, pid: int, output: int, wait: Callable[[], int | None], log: Relay) -> None:
        self.pid = pid
        self.lines: deque[str] = deque(maxlen=RING_LINES)
        self.num_lines = 0  # so far, those that have left the ring too
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self._output_ended = asyncio.Event()
        self._output = output
        self._wait_for = wait
        self._log = log
        for work, name in ((self._wait, "wait"), (self._read, "output")):
            threading.Thread(target=work, name=f"worker-{self.pid}-{name}", daemon=True).start()

    def _wait(self) -> None:
        code = self._wait_for()
        self._tell(lambda: self.exited.set_result(code))

    def _read(self) -> None:
        lines = Lines()
        with contextlib.suppress(OSError):
            while chunk := os.read(self._output, _CHUNK):
                self._keep(lines.feed(chunk))
                if len(chunk) == _CHUNK:
                    time.sleep(_FLOOD_S)
        self._keep(lines.end())
        self._log.tell_dropped()
        os.close(self._output)
        self._tell(self._output_ended.set)

    def _keep(self, lines: list[bytes]) -> None:
        now = time.monotonic()
        for line in lines:
            self._log.take(line, now)
        self.num_lines += len(lines)
        self.lines.extend(line[:MAX_LINE].decode("utf-8", "replace").rstrip() for line in lines[-RING_LINES:])

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

    def lines_since(self, count: int) -> list[str]:
        """The lines after the first `count`, as far as the ring still has them."""
        new = self.num_lines - count
        return list(self.lines)[-new:] if new > 0 else []

    def signal(self, number: signal.Signals) -> None:
        """To the whole group (its session is its own); a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def child(popen: "subprocess.Popen[bytes]", log: Relay) -> Process:
    """The process that we have just started."""
    assert popen.stdout is not None
    return Process(popen.pid, os.dup(popen.stdout.fileno()), popen.wait, log)


def adopted(pid: int, output: int, log: Relay) -> Process:
    """A live process that is not of our starting, or was of the program we were before an exec."""
    pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    began = started_at(pid)
    return Process(pid, output, lambda: _until_gone(pid, pidfd, began), log)


def _until_gone(pid: int, pidfd: int, began: float) -> int | None:
    """Blocks until the process has ended, and reaps it where it is our child."""
    if pidfd >= 0:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll()
        os.close(pidfd)
    else:
        while is_same(pid, began):
            time.sleep(_POLL_S)
    return reap(pid)


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended; None where it is no child of ours, or has not ended."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None
