"""Taking over a worker that an earlier parent left: prove ourselves to it, or end it.

The worker listens at its control socket once the channel of its own parent is closed. We say `Adopt` with the nonce
that it was launched with and hand it the write end of a pipe for its output; it answers `Hello`, and a model's `Ready`.
That socket is then the control channel.
"""

import array
import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from parent.workers.channel import Channel
from parent.workers.process import Process, adopted, is_same, is_stopped, reap
from parent.workers.relay import Relay
from shared import control, ndjson
from shared.version import VERSION, WIRE

CONNECT_S = 1.0
READY_S = 5.0
WAKE_S = 0.25
POLL_S = 0.02
KILL_S = 5.0


class NotAdopted(Exception):
    """The worker cannot be taken over; the message says why."""


class Record(Protocol):
    """What has to be known of a worker: who it is, where it listens, and what it wants to hear."""

    @property
    def pid(self) -> int: ...
    @property
    def start_time(self) -> float: ...
    @property
    def socket(self) -> str: ...
    @property
    def adopt_socket(self) -> str: ...
    @property
    def nonce(self) -> str: ...
    @property
    def wire(self) -> int: ...


Answer = TypeVar("Answer", control.Hello, control.Ready)


class Introduction(Generic[Answer]):
    """One attempt. What the worker says waits here until `hand_over`, so that nothing of it is lost.

    `answer`: the message that says that it is ours. `log` takes what it logs from then on. `heard`: see `Adopt`.
    """

    def __init__(self, record: Record, answer: type[Answer], log: Relay, heard: int = 0) -> None:
        self.record = record
        self.channel = Channel(self._message)
        self._kind: type[Answer] = answer
        self._log, self._last = log, heard
        self._heard: list[control.FromWorker] = []
        self._listener: Callable[[control.FromWorker], None] | None = None
        self._ready: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def begin(self) -> tuple[Answer, Process]:
        """Its answer and its process. Raises `NotAdopted`; the channel is closed then."""
        record = self.record
        if record.wire != WIRE:
            raise NotAdopted(f"it speaks wire {record.wire}, this is mlxd {VERSION} (wire {WIRE})")
        output, theirs = os.pipe()
        try:
            await self._connect(theirs)
            ready = await self._answer()
            return ready, adopted(record.pid, output, self._log)  # which now owns the pipe
        except BaseException as error:
            self.channel.close()
            os.close(output)
            if isinstance(error, OSError | TimeoutError):
                raise NotAdopted(f"its control socket does not answer: {error or 'timed out'}") from None
            raise
        finally:
            os.close(theirs)

    def hand_over(self, listener: Callable[[control.FromWorker], None]) -> None:
        """From now on `listener` gets the messages, those that have come meanwhile first."""
        self._listener = listener
        for message in self._heard:
            listener(message)

    async def _connect(self, output: int) -> None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(end, self.record.adopt_socket)
            hello = ndjson.encode(control.Adopt(WIRE, VERSION, self.record.nonce, self._last))
            end.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output]))])
            await self.channel.open(end)
        except BaseException:
            end.close()
            raise

    async def _answer(self) -> Answer:
        hung_up = asyncio.ensure_future(self.channel.closed.wait())
        either: list[asyncio.Future[object]] = [self._ready, hung_up]  # type: ignore[list-item]
        until = asyncio.get_running_loop().time() + READY_S
        try:
            while not self._ready.done() and not hung_up.done():
                self._wake()  # one that somebody stopped, perhaps only now
                left = until - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                wait_s = min(left, WAKE_S)
                await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
        if not self._ready.done():
            why = "it hung up" if self.channel.closed.is_set() else f"it said nothing within {READY_S:g} s"
            raise NotAdopted(why)
        return self._ready.result()

    def _wake(self) -> None:
        record = self.record
        if is_same(record.pid, record.start_time) and is_stopped(record.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGCONT)

    def _message(self, message: control.FromWorker) -> None:
        if self._listener is not None:
            self._listener(message)
            return
        if self._ready.done():
            self._heard.append(message)
        elif isinstance(message, control.Hello) and message.pid != self.record.pid:
            said = f"process {message.pid} answers, the record is of {self.record.pid}"
            self._ready.set_exception(NotAdopted(said))
        elif isinstance(message, self._kind):
            self._ready.set_result(message)
        elif not isinstance(message, control.Hello):
            self._heard.append(message)


async def end(record: Record, grace_s: float) -> None:
    """Stop the process of the record (TERM, then KILL) if it is still that one, and remove its sockets."""
    loop = asyncio.get_running_loop()
    for step, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        if not is_same(record.pid, record.start_time):
            break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(record.pid, step)
            os.killpg(record.pid, signal.SIGCONT)  # a stopped one takes TERM only when it goes on
        until = loop.time() + wait_s
        while loop.time() < until:
            if not is_same(record.pid, record.start_time):
                break
            await asyncio.sleep(POLL_S)
    reap(record.pid)
    for path in (record.socket, record.adopt_socket):
        with contextlib.suppress(OSError):
            os.unlink(path)
