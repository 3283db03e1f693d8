"""Start order, signals, stop order. The parent listens before the model is loaded and outlives every worker.

First SIGTERM, SIGINT or SIGHUP: stop accepting, answer who waits, let running answers finish (at most `drain_s`),
end the workers, remove sockets and files. A second signal means now.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parent import ports
from parent.app import Application
from parent.config import Settings
from parent.instance import Instance
from parent.library.library import Library
from parent.library.machine import Device, find_device
from parent.live_config import LiveConfig
from shared.logs import event

log = logging.getLogger(__name__)
LAST_FRAMES_S = 2.0  # after the drain, for error frames to leave
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed
_NOT_OURS = ("Unsupported upgrade", "No supported WebSocket library")  # hints to install what we do not want


class Connection(HttpToolsProtocol):
    """uvicorn's, but the head of a request may not take forever either."""

    def __init__(self, *args: Any, request_wait_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_wait_s = request_wait_s
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What is no head and ends the keep-alive timer all the same: an empty line, a body that nobody reads.
        if (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_due is None and not self.transport.is_closing():
            self._head_due = self.loop.call_later(self._request_wait_s, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class Server(uvicorn.Server):
    """uvicorn with our signals instead of its own, and a word when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drop_all(self) -> None:
        """Cut what still runs."""
        self.should_exit = self.force_exit = True
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(application: Application, drain_s: float | None, request_wait_s: float) -> Server:
    """uvicorn around the app; httptools and uvloop are what the token path was measured with."""
    its_log = logging.getLogger("uvicorn.error")
    its_log.setLevel(logging.WARNING)  # we say ourselves when it listens
    its_log.addFilter(_is_worth_saying)
    return Server(
        uvicorn.Config(
            application.asgi,
            http=partial(Connection, request_wait_s=request_wait_s),  # type: ignore[arg-type]  # is only called
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ports.BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # a float works and is meant
        )
    )


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOT_OURS)


def serve(
    live: LiveConfig,
    library: Library,
    *,
    default: str = "",
    device: Device | None = None,
    worker_command: list[str] | None = None,
    worker_env: dict[str, str] | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serve the models of `library` until a signal; `default` is loaded at start. Returns the exit code.

    Raises `Refused` when the data folder is served already, the port is taken, or the pinned models cannot fit.
    """
    settings = live.settings
    with Instance(settings.data_dir) as instance:
        listener = ports.bind(settings.host, settings.port)
        with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            application = Application(
                live,
                library,
                device or find_device(),
                default=default,
                runtime_dir=instance.runtime_dir,
                worker_command=worker_command,
                worker_env=worker_env,
            )
            url = ports.url_of(listener, settings.host)
            instance.announce(url)
            return runner.run(_serve(application, settings, listener, url, on_listening))


async def _serve(
    application: Application,
    settings: Settings,
    listener: socket.socket,
    url: str,
    on_listening: Callable[[str], None] | None,
) -> int:
    server = make_server(application, settings.drain_s + LAST_FRAMES_S, settings.request_wait_s)
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if number is signal.SIGHUP and received:
            return  # a closing terminal sends it twice, and means no haste
        received.append(number)
        event(log, "server.signal", signal=number.name, count=len(received))
        if len(received) == 1:
            server.should_exit = True
            application.close()
            loop.call_later(settings.drain_s, application.pool.cut)
        else:
            server.drop_all()
            application.pool.kill()

    for number in SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stop, number)
    await application.start([])
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await server.listening.wait()
        event(log, "server.listening", url=url)
        if on_listening is not None:
            on_listening(url)
        await serving
    finally:
        await application.stop()
        event(log, "server.stopped")
    return 0 if len(received) < 2 else 128 + received[-1]
