"""Start order, signals, stop order. The parent listens before the model is loaded and outlives every worker.

First SIGTERM or SIGINT: stop accepting, answer who waits, let running answers finish (at most `drain_s`), end the
workers, remove sockets and files. A second signal means now. SIGHUP reads the settings again, unless the terminal
that we were started from is gone: then it means stop. A restart in place (`parent/restarter.py`) ends in an exec.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parent import handover, ports
from parent.admin.restart import Restart
from parent.app import Application
from parent.config import Settings
from parent.instance import Instance
from parent.library.library import Library
from parent.library.machine import Device, find_device
from parent.live_config import LiveConfig
from parent.restarter import Endings, Restarter
from shared.logs import event

log = logging.getLogger(__name__)
LAST_FRAMES_S = 2.0  # after the drain, for error frames to leave
HEADS_S = 0.1  # before a pause closes connections: what has arrived on them is read
FRESH_S = 1.0  # the same for those that have not asked for anything yet
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

    def __init__(
        self, config: uvicorn.Config, application: Application, listener: socket.socket, endings: Endings
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._application = application
        self._listener = listener  # stays open: what uvicorn gets, and closes, is a copy
        self._endings = endings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def pause(self) -> None:
        """Accept nothing, and close each connection once its answer has left. Who comes waits in the kernel."""
        self._endings.end()
        for server in self.servers:
            server.close()
        self.servers = []
        await asyncio.sleep(HEADS_S)
        for connection in list(self.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()
        if self.server_state.connections:
            await asyncio.sleep(FRESH_S - HEADS_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def resume(self) -> None:
        """Accept again."""
        if not self.should_exit:
            await super().startup([self._listener.dup()])

    def num_open(self) -> int:
        """Connections whose answer has not left yet."""
        return len(self.server_state.connections)

    def cut(self) -> None:
        """Answers that run end with their protocol's error frame; the workers stay."""
        self._application.close()
        for supervisor in self._application.pool.supervisors():
            supervisor.cut()

    async def suspend(self) -> None:
        """End jobs and close files; the new image opens them and goes on. The workers stay."""
        await self._application.jobs.close()
        await self._application.db.close()

    def leave(self) -> None:
        """Shut down."""
        self.should_exit = True

    def drop_all(self) -> None:
        """Cut what still runs."""
        self.should_exit = self.force_exit = True
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(application: Application, listener: socket.socket, settings: Settings) -> Server:
    """uvicorn around the app; httptools and uvloop are what the token path was measured with."""
    its_log = logging.getLogger("uvicorn.error")
    its_log.setLevel(logging.WARNING)  # we say ourselves when it listens
    its_log.addFilter(_is_worth_saying)
    endings = Endings(application.asgi)
    return Server(
        uvicorn.Config(
            endings,
            http=partial(Connection, request_wait_s=settings.request_wait_s),  # type: ignore[arg-type]  # is only called
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ports.BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=settings.drain_s + LAST_FRAMES_S,  # type: ignore[arg-type]  # a float works and is meant
        ),
        application,
        listener,
        endings,
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
    keep_fds: Sequence[int] = (),
) -> int:
    """Serve the models of `library` until a signal; `default` is loaded at start. Returns the exit code.

    `on_listening` is told the address, but not again after a restart in place. `keep_fds` survive such a restart.

    Raises `Refused` when the data folder is served already, the port is taken, or the pinned models cannot fit.
    """
    given = handover.received()
    if given is not None and given.check:
        return 0  # we came as far as serving
    settings = live.settings
    with Instance(settings.data_dir, lock_fd=given.lock if given else -1) as instance:
        listener = handover.listener_of(given) if given else ports.bind(settings.host, settings.port)
        restarter = Restarter(
            instance.boot,
            drain_s=settings.drain_s,
            execute=lambda: handover.execute(listener.fileno(), instance.lock_fd, keep_fds),
            preflight=lambda: handover.preflight(keep_fds),
        )
        with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            application = Application(
                live,
                library,
                device or find_device(),
                default=default,
                runtime_dir=instance.runtime_dir,
                restart=Restart(restarter.boot, restarter.request, restarter.status),
                worker_command=worker_command,
                worker_env=worker_env,
            )
            url = ports.url_of(listener, settings.host)
            instance.announce(url)
            if given is not None:
                handover.reap_strangers({record.pid for record in instance.leftovers()})
                on_listening = None
            return runner.run(_serve(application, instance, restarter, listener, url, on_listening))


async def _serve(
    application: Application,
    instance: Instance,
    restarter: Restarter,
    listener: socket.socket,
    url: str,
    on_listening: Callable[[str], None] | None,
) -> int:
    settings = application.live.settings
    server = make_server(application, listener, settings)
    restarter.serves(server)
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []
    had_terminal = has_terminal()

    def stop(number: signal.Signals) -> None:
        if number is signal.SIGHUP and received:
            return  # a closing terminal sends it twice, and means no haste
        received.append(number)
        event(log, "server.signal", signal=number.name, count=len(received))
        if len(received) == 1:
            restarter.close()
            server.should_exit = True
            listener.close()
            application.close()
            loop.call_later(settings.drain_s, application.pool.cut)
        else:
            server.drop_all()
            application.pool.kill()

    def hang_up() -> None:
        if had_terminal and not has_terminal():
            stop(signal.SIGHUP)
        elif not received:
            application.reload()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    accepting = listener.dup()
    try:
        kept = await application.start(instance.leftovers())
        await instance.clear_leftovers(kept)
        serving = asyncio.ensure_future(server.serve(sockets=[accepting]))
        await server.listening.wait()
        event(log, "server.listening", url=url)
        if on_listening is not None:
            on_listening(url)
        await serving
    finally:
        await application.stop()
        event(log, "server.stopped")
    return 0 if len(received) < 2 else 128 + received[-1]


def has_terminal() -> bool:
    """Whether the terminal that this process was started from, if any, is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
