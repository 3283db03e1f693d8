"""A Starlette app on loopback, in a thread: what the fakes of other people's servers stand on."""

import threading

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route


class Loopback:
    """Serves from its making on, until `close`. `port`: any free one."""

    def __init__(self, routes: list[Route]) -> None:
        config = uvicorn.Config(
            Starlette(routes=routes),
            host="127.0.0.1",
            port=0,
            log_config=None,
            log_level="critical",
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.005)
            assert self._thread.is_alive(), "the server did not start"
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Cuts what is open."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
