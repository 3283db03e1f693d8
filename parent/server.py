"""Start order, signals, stop order. The parent listens before the model is loaded and outlives every worker.

First SIGTERM or SIGINT: stop accepting, answer who waits, let running answers finish (at most `drain_s`), end the
workers, remove sockets and files. A second signal means now.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
import uvloop

from parent import ports
from parent.app import Application
from parent.config import Settings
from parent.instance import Instance
from parent.library.catalog import ModelEntry
from shared.logs import event

log = logging.getLogger(__name__)
LAST_FRAMES_S = 2.0  # after the drain, for error frames to leave
SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def make_server(application: Application, drain_s: float | None) -> Server:
    """uvicorn around the app; httptools and uvloop are what the token path was measured with."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # we say ourselves when it listens
    return Server(
        uvicorn.Config(
            application.asgi,
            http="httptools",
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


def serve(
    settings: Settings,
    models: Sequence[ModelEntry],
    *,
    worker_command: list[str] | None = None,
    worker_env: dict[str, str] | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serve `models` (the first is the default) until a signal. Returns the exit code.

    Raises `Refused` when the data folder is served already or the port is taken.
    """
    with Instance(settings.data_dir) as instance:
        listener = ports.bind(settings.host, settings.port)
        with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            application = Application(
                settings,
                models,
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
    server = make_server(application, settings.drain_s + LAST_FRAMES_S)
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
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
        loop.add_signal_handler(number, stop, number)
    application.start()
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
