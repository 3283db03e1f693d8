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

import uvicorn
import uvloop

from parent import handover, ports
from parent.admin.restart import Restart
from parent.app import Application
from parent.connections import Connection, Terms
from parent.instance import Instance
from parent.library.library import Library
from parent.library.machine import Device, find_device
from parent.live_config import LiveConfig
from parent.restarter import Endings, Restarter
from shared.errors import Refused
from shared.logs import event

log = logging.getLogger(__name__)
LAST_FRAMES_S = 2.0  # after the drain, for error frames to leave
TICKS = 10  # of uvicorn's, in a second
_NOT_OURS = ("Unsupported upgrade", "No supported WebSocket library")  # hints to install what we do not want


class Server(uvicorn.Server):
    """uvicorn with our signals instead of its own, and a word when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        application: Application,
        listener: ports.Listener,
        endings: Endings,
        terms: Terms,
        *,
        every_second: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._application = application
        self._listener = listener  # stays open: what uvicorn gets, and closes, is a copy
        self._endings = endings
        self._terms = terms
        self._every_second = every_second

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        while self._listener.waiting:
            await self._keep(self._listener.waiting.pop())
        self.listening.set()

    async def _keep(self, connection: socket.socket) -> None:
        """Go on with a connection that an earlier image has accepted."""
        kind: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        make = partial(
            kind,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            kept=True,
        )
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(make, connection)
        except OSError:  # its client has left
            connection.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self._every_second()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def pause(self) -> None:
        """Accept nothing, and read no further request. Who comes, and what comes, waits in the kernel."""
        self._terms.is_paused = True
        self._endings.end()
        for server in self.servers:
            server.close()
        self.servers = []
        await asyncio.sleep(0)  # who has been accepted just now is made a connection of
        for connection in self._connections():
            connection.settle()

    async def resume(self) -> None:
        """Accept and read again."""
        self._terms.is_paused = False
        if not self.should_exit:
            await super().startup([self._listener.socket.dup()])
            for connection in self._connections():
                connection.go_on()

    def num_open(self) -> int:
        """Connections on which something is under way, and responses that are made without one."""
        held = sum(not connection.is_parked for connection in self._connections())
        return held + self._application.background.num_running

    def parked(self) -> list[int]:
        """The sockets of all others."""
        return [connection.fileno() for connection in self._connections() if connection.is_parked]

    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    def cut(self) -> None:
        """Answers that run end with their protocol's error frame; the workers stay."""
        self._application.close()
        for supervisor in self._application.pool.supervisors():
            supervisor.cut()

    async def suspend(self) -> None:
        """Close files; the new image opens them and goes on. The workers stay, those of jobs too."""
        await self._application.background.close()
        await self._application.jobs.suspend()
        await self._application.db.close()

    def leave(self) -> None:
        """Shut down: answers that run have `drain_s` and a moment."""
        drain_s = self._application.live.settings.drain_s
        self.config.timeout_graceful_shutdown = drain_s + LAST_FRAMES_S  # type: ignore[assignment]  # a float works
        self.should_exit = True

    def drop_all(self) -> None:
        """Cut what still runs."""
        self.should_exit = self.force_exit = True
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(
    application: Application, listener: ports.Listener, every_second: Callable[[], object]
) -> Server:
    """uvicorn around the app; httptools and uvloop are what the token path was measured with."""
    its_log = logging.getLogger("uvicorn.error")
    its_log.setLevel(logging.WARNING)  # we say ourselves when it listens
    its_log.addFilter(_is_worth_saying)
    endings = Endings(application.asgi)
    terms = Terms(lambda: application.live.settings.request_wait_s)
    return Server(
        uvicorn.Config(
            endings,
            http=partial(Connection, terms=terms),  # type: ignore[arg-type]  # is only called
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ports.BACKLOG,
            timeout_keep_alive=75,
        ),
        application,
        listener,
        endings,
        terms,
        every_second=every_second,
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
    settings = live.settings
    if given is not None and given.check:
        if (given.host, given.port) != (settings.host, settings.port):
            ports.try_move(settings.host, settings.port, given.bound)
        return 0  # we came as far as serving
    with Instance(settings.data_dir, lock_fd=given.lock if given else -1) as instance:
        listener, reason = _listen(given, settings.host, settings.port)
        restarter = Restarter(
            instance.boot,
            drain_s=lambda: live.settings.drain_s,
            execute=lambda clients: handover.execute(listener, instance.lock_fd, clients, keep_fds),
            preflight=lambda: _preflight(instance, listener, keep_fds),
            settle=lambda: application.pool.crew.write_records(),
        )
        with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            application = Application(
                live,
                library,
                device or find_device(),
                default=default,
                runtime_dir=instance.runtime_dir,
                restart=Restart(
                    restarter.boot,
                    restarter.request,
                    restarter.status,
                    lambda: live.settings.request_wait_s,
                ),
                worker_command=worker_command,
                worker_env=worker_env,
            )
            if given is not None:
                handover.reap_strangers({record.pid for record in instance.leftovers()})
                on_listening = None
            return runner.run(_serve(application, instance, restarter, listener, reason, on_listening))


async def _preflight(instance: Instance, listener: ports.Listener, keep_fds: Sequence[int]) -> str:
    return instance.keep() or await handover.preflight(listener, keep_fds)


def _listen(given: handover.Handover | None, host: str, port: int) -> tuple[ports.Listener, str]:
    """What listens, and why not where it should: after a restart in place it stays where it is, if need be."""
    if given is None:
        return ports.Listener(host, port), ""
    listener = handover.listener_of(given)
    listener.waiting = handover.connections_of(given)
    if (listener.host, listener.port) == (host, port):
        return listener, ""
    try:
        listener.move(host, port)
    except Refused as refused:
        event(log, "server.not_moved", level=logging.WARNING, url=listener.url, reason=str(refused))
        return listener, f"it still listens at {listener.url}: {refused}"
    return listener, ""


async def _serve(
    application: Application,
    instance: Instance,
    restarter: Restarter,
    listener: ports.Listener,
    reason: str,
    on_listening: Callable[[str], None] | None,
) -> int:
    server = make_server(application, listener, instance.keep)
    restarter.serves(server, reason)
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
            server.leave()
            listener.close()
            application.close()
            loop.call_later(application.live.settings.drain_s, application.pool.cut)
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handover.SIGNALS)  # an exec in place held them back
    accepting, url = listener.socket.dup(), listener.url
    application.jobs.url = url
    instance.announce(url)  # only now: who reads it may send a signal
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
