"""The parent's end of a control channel: typed messages in and out, and the end of file that means death."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from shared import control, ndjson
from shared.logs import event

log = logging.getLogger(__name__)
MAX_LINE = 1 << 20  # bytes; what a worker says here is short
MAX_UNREADABLE = 100  # messages; who says more speaks another language
_decode = msgspec.json.Decoder(control.FromWorker).decode


class Channel(asyncio.Protocol):
    """`await open(end)` before use. `on_message` gets each message; `closed` is set at end of file."""

    def __init__(self, on_message: Callable[[control.FromWorker], None]) -> None:
        self.closed = asyncio.Event()
        self.fault = ""  # why we closed it
        self._on_message = on_message
        self._lines = ndjson.Lines(MAX_LINE)
        self._unreadable = 0
        self._transport: asyncio.WriteTransport | None = None

    async def open(self, end: socket.socket) -> None:
        """Take over the parent's end of the socket pair. The first message may arrive before this returns."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        try:
            lines = self._lines.feed(data)
        except ndjson.LineTooLong as error:
            event(log, "channel.bad_line", level=logging.ERROR, error=str(error))
            self.fault = f"on its control channel {error}"
            self.close()
            return
        for line in lines:
            try:
                message = _decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                # An unknown type is of a newer worker: known ones still mean the same.
                event(log, "channel.unknown_message", level=logging.WARNING, error=str(error))
                self._unreadable += 1
                if self._unreadable > MAX_UNREADABLE:
                    self.fault = (
                        f"its control channel brought more than {MAX_UNREADABLE} messages that are none"
                    )
                    self.close()
                    return
                continue
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def send(self, message: control.ToWorker) -> None:
        """Write one message; a worker that is gone is noticed by its end of file, not here."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(ndjson.encode(message))

    def close(self) -> None:
        """End of file for the worker, which then leaves."""
        if self._transport is not None:
            self._transport.close()
