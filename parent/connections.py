"""Connections of clients: uvicorn's, with a bound for slow heads, and such that a restart in place keeps them.

While the server is paused, a connection without a request is parked: nothing is read from it, so what a client sends
stays in the kernel, for the next image (which gets the socket) or for this one where it goes on.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HALF_S = 1.0  # in a pause: for the rest of a head that has begun, or of a body that nobody reads


class Terms:
    """What all connections of a server share. `request_wait_s` is asked for each head that is awaited."""

    def __init__(self, request_wait_s: Callable[[], float]) -> None:
        self.request_wait_s = request_wait_s
        self.is_paused = False


class Connection(HttpToolsProtocol):
    """One. `kept`: an earlier image has accepted it, and perhaps answered on it."""

    def __init__(self, *args: Any, terms: Terms, kept: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._terms = terms
        self._was_used = kept
        self._in_message = False  # some of a request has been read, and not all of it
        self._parked = False
        self._head_due: asyncio.TimerHandle | None = None
        self._half_due: asyncio.TimerHandle | None = None

    @property
    def is_parked(self) -> bool:
        """Whether nothing is under way: no byte of a request was read, and every byte of the answers is sent."""
        return self._parked and not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def fileno(self) -> int:
        """Of its socket."""
        return int(self.transport.get_extra_info("socket").fileno())

    def settle(self) -> None:
        """The server is paused: park where nothing is under way; half a request gets a moment for its rest."""
        if self._parked or self.transport.is_closing() or self._is_answering():
            return
        if self._in_message:
            if self._half_due is None:
                self._half_due = self.loop.call_later(HALF_S, self._half)
            return
        self._parked = True
        self._head_is_here()
        self._unset_keepalive_if_required()
        self.flow.pause_reading()

    def go_on(self) -> None:
        """The pause is over, without a restart."""
        if self._parked and not self.transport.is_closing():
            self._parked = False
            self._await_request()
            self.flow.resume_reading()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_request()
        if self._terms.is_paused:
            self.loop.call_soon(self.settle)  # reading begins after this

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What is no head and ends the keep-alive timer all the same: an empty line, a body that nobody reads.
        if not self._is_answering() and self.timeout_keep_alive_task is None:
            self._await_head()
        if self._terms.is_paused:
            self.settle()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        self._was_used = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._terms.is_paused:
            self.settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        if self._half_due is not None:
            self._half_due.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _half(self) -> None:
        self._half_due = None
        if self._terms.is_paused and self._in_message and not self._is_answering():
            self.transport.close()

    def _await_request(self) -> None:
        if self._was_used:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self._await_head()

    def _await_head(self) -> None:
        if self._head_due is None and not self.transport.is_closing():
            self._head_due = self.loop.call_later(self._terms.request_wait_s(), self.transport.abort)

    def _head_is_here(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
