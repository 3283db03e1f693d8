"""One process of a supervisor with all that is its own: channel, sockets, nonce, output. From spawn or adoption to
the moment when nothing of it is left.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from parent.workers import adoption, launcher
from parent.workers.channel import Channel
from parent.workers.process import Process, started_at
from parent.workers.relay import Relay
from parent.workers.runtime_file import RuntimeRecord
from shared import control
from shared.version import VERSION, WIRE

HANGS_UP_S = 1.0  # between the end of the control channel and that of the process
LAST_WORDS_S = 0.5


class Spawned:
    """Made by `spawn` or `adopt`."""

    def __init__(self, record: RuntimeRecord, process: Process, channel: Channel) -> None:
        self.record = record
        self.process = process
        self.channel = channel
        self._asked_stacks: int | None = None  # lines of output at that moment

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, *numbers: signal.Signals) -> None:
        """To its group, in this order."""
        for number in numbers:
            self.process.signal(number)

    def ask_stacks(self) -> None:
        """Have it write the stacks of its threads into its output."""
        self._asked_stacks = self.process.num_lines
        self.signal(signal.SIGUSR1, signal.SIGCONT)

    def stacks(self) -> str:
        """What it wrote after `ask_stacks`; "" where it was not asked."""
        return "" if self._asked_stacks is None else "\n".join(self.process.lines_since(self._asked_stacks))

    async def ended(self, on_hang_up: Callable[[], None]) -> int | None:
        """The exit code, once the last message is read too. `on_hang_up`: its channel closed and it lives on."""
        process, channel = self.process, self.channel
        hung_up = asyncio.ensure_future(channel.closed.wait())
        either: list[asyncio.Future[object]] = [process.exited, hung_up]  # type: ignore[list-item]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not process.exited.done():
            await asyncio.wait({process.exited}, timeout=HANGS_UP_S)
            if not process.exited.done():
                on_hang_up()
        code = await process.exited
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the other end open
            async with asyncio.timeout(LAST_WORDS_S):
                await hung_up
        hung_up.cancel()
        return code

    async def clear(self) -> None:
        """After `ended`: its grandchildren and sockets go, its last output comes."""
        self.signal(signal.SIGKILL)
        await self.process.output_ended(LAST_WORDS_S)
        self.channel.close()
        for path in (self.record.socket, self.record.adopt_socket):
            launcher.remove_socket(path)


def spawn(
    launch: control.LaunchModel,
    *,
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    name: str,
    epoch: int,
    on_message: Callable[[control.FromWorker], None],
) -> tuple[Spawned, socket.socket]:
    """Start the process, with a nonce of its own. Its channel still has to be opened with the socket returned.

    Raises OSError.
    """
    launch = replace(launch, nonce=secrets.token_hex(16))
    path, adopt_path = (folder / f"{name}-{epoch}.{kind}" for kind in ("sock", "ctl"))
    process, control_end = launcher.start(
        command,
        environment=environment,
        socket_path=path,
        adopt_path=adopt_path,
        ids={"model": launch.model_id},
    )
    record = RuntimeRecord(
        name=name,
        pid=process.pid,
        start_time=started_at(process.pid),
        socket=str(path),
        adopt_socket=str(adopt_path),
        nonce=launch.nonce,
        wire=WIRE,
        version=VERSION,
        launch=launch,
        command=command,
        epoch=epoch,
        server=os.getpid(),
        server_start=started_at(os.getpid()),
    )
    return Spawned(record, process, Channel(on_message)), control_end


async def adopt(
    record: RuntimeRecord,
) -> tuple[Spawned, "adoption.Introduction[control.Ready]", control.Ready]:
    """Take over the worker of an earlier parent; its messages wait in the introduction.

    Raises `NotAdopted`, OSError.
    """
    log = Relay({"model": record.launch.model_id, "pid": record.pid})
    introduction = adoption.Introduction(record, control.Ready, log)
    ready, process = await introduction.begin()
    record = replace(
        record,
        start_time=started_at(record.pid),  # by our clock, which may have been set since
        server=os.getpid(),
        server_start=started_at(os.getpid()),
    )
    return Spawned(record, process, introduction.channel), introduction, ready
