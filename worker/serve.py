"""The life of a model worker: load, serve the inherited socket, heartbeat, drain, leave."""

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import uvicorn

from shared.control import (
    Adopt,
    Drain,
    Drained,
    ExitCode,
    Fatal,
    Heartbeat,
    LaunchModel,
    Ready,
    Resize,
    Shutdown,
    ToWorker,
)
from shared.errors import Refused
from worker.app import build_app
from worker.context import open_context
from worker.control import Control
from worker.embed.embedder import Embedder
from worker.engine.engine import Engine, Output
from worker.leave import exit_code, leave
from worker.load import Loading
from worker.pipeline import Pipeline

log = logging.getLogger("worker")

HEARTBEAT_S = 1.0
BACKLOG = 1024


class SocketServer(uvicorn.Server):
    """uvicorn on one given socket, without its signal handlers: the control channel says when to leave."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


async def serve(
    launch: LaunchModel, control: Control, data_fd: int, engine: Engine, loading: Loading
) -> NoReturn:
    """Wait for the model, answer until told to leave, end the process."""
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[ToWorker] = asyncio.Queue()
    pipeline: Pipeline | None = None

    def on_outputs(outputs: list[Output]) -> None:
        if pipeline is not None:
            loop.call_soon_threadsafe(pipeline.dispatch, outputs)

    def on_message(message: ToWorker) -> None:
        loop.call_soon_threadsafe(messages.put_nowait, message)

    def greet() -> None:
        """To the parent, also to one who has adopted us."""
        control.send(Ready(context.facts, engine.stats().active_bytes))

    engine.on_outputs = on_outputs
    control.listen(on_message, lambda: leave(ExitCode.CLEAN))
    opening = asyncio.create_task(open_context(launch, loading))
    hearing = asyncio.create_task(_until_shutdown(messages, control, engine, lambda: pipeline, greet))
    await asyncio.wait({opening, hearing}, return_when=asyncio.FIRST_COMPLETED)
    if hearing.done():
        leave(ExitCode.CLEAN)
    try:
        context = opening.result()
    except Refused as refused:
        control.send(Fatal(refused.failure))
        leave(exit_code(refused.failure))
    pipeline = Pipeline(context, engine)
    gc.collect()
    gc.freeze()  # what is loaded stays; later collections need not look at it

    server = SocketServer(
        uvicorn.Config(
            build_app(pipeline, Embedder(pipeline, engine), engine.stats),
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=3600,
            ws="none",
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=data_fd)]))
    up = asyncio.create_task(server.is_up.wait())
    await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    control.may_be_adopted(launch.nonce, launch.grace_s)
    greet()
    Pulse(control, engine)
    await asyncio.wait({serving, hearing}, return_when=asyncio.FIRST_COMPLETED)
    engine.close(timeout_s=1.0)
    leave(ExitCode.CLEAN if hearing.done() else ExitCode.BUG)


async def _until_shutdown(
    messages: "asyncio.Queue[ToWorker]",
    control: Control,
    engine: Engine,
    pipeline: Callable[[], Pipeline | None],
    greet: Callable[[], None],
) -> None:
    """Handle what the parent says until it says `Shutdown`."""
    draining: asyncio.Task[None] | None = None
    while not isinstance(message := await messages.get(), Shutdown):
        if isinstance(message, Drain) and draining is None:
            draining = asyncio.create_task(_drain(control, pipeline(), engine))
        elif isinstance(message, Resize) and (serving := pipeline()) is not None:
            serving.resize(message.kv_bytes, message.prefix_cache_bytes)
        elif isinstance(message, Adopt):  # what the last parent wanted is nothing to this one
            if draining is not None:
                draining.cancel()
                draining = None
            if (serving := pipeline()) is not None:
                serving.is_draining = False
            greet()
    if draining is not None:
        draining.cancel()
        await asyncio.wait({draining})  # so that a spill hears of it, and leaves no file half written


async def _drain(control: Control, pipeline: Pipeline | None, engine: Engine) -> None:
    """Answer what is in flight, keep the prefix cache for the next worker, say so. Cancelled: go on serving."""
    if pipeline is not None:
        await pipeline.drained()
        stop = threading.Event()
        try:
            await asyncio.wrap_future(engine.spill(stop.is_set))
        except Exception:  # kept prompts are a matter of speed: the drain goes on
            log.exception("worker.spill_failed")
        finally:
            stop.set()
    control.send(Drained())


class Pulse:
    """Heartbeats from a thread of their own: a loop or an engine that is busy is not dead, but it is told.

    `busy_s` of a heartbeat is how long the engine has been in its step, or the loop without a turn, whichever
    is longer.
    """

    def __init__(self, control: Control, engine: Engine) -> None:
        self._control = control
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._asked_at: float | None = None  # when the loop was asked for a turn that it has not had yet
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            now = time.monotonic()
            lag_s = 0.0 if self._asked_at is None else now - self._asked_at
            if self._asked_at is None:
                self._asked_at = now
                self._loop.call_soon_threadsafe(self._turn)
            busy_s = max(self._engine.busy_s(), lag_s)
            self._control.send(Heartbeat(self._engine.stats(), round(busy_s, 3)))
            time.sleep(HEARTBEAT_S)

    def _turn(self) -> None:
        self._asked_at = None
