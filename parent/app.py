"""The composition root: every object is built here once, and every route is visible here."""

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Route, Router

from parent.access import Policy
from parent.admin.workers import Workers
from parent.bus import Bus
from parent.config import Settings
from parent.inference.forward import Forwarder
from parent.library.catalog import ModelEntry
from parent.pool.pool import Pool
from parent.protocols import PROTOCOLS
from parent.routes.front import Front, not_found
from parent.routes.health import Health
from parent.routes.inference import InferenceRoute
from parent.routes.models import Models
from parent.routes.static import Static
from shared import asgi


class Application:
    """The parent without its listener: `asgi` is the app, `start` loads the model, `stop` ends the workers."""

    def __init__(
        self,
        settings: Settings,
        models: Sequence[ModelEntry],
        *,
        runtime_dir: Path,
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        self.bus = Bus()
        self.pool = Pool(
            models,
            settings,
            runtime_dir=runtime_dir,
            worker_command=worker_command,
            worker_env=worker_env,
            on_change=self._publish,
        )
        self.forwarder = Forwarder(self.pool)
        self.health = Health(self.pool)
        self.asgi = Front(
            Router(routes=self._routes(settings), default=not_found, redirect_slashes=False),
            Policy(settings.host, settings.allowed_hosts, platform.node()),
        )

    def _routes(self, settings: Settings) -> list[BaseRoute]:
        health, static = self.health, Static()
        models = Models(self.pool, created=int(time.time()))
        workers = Workers(self.pool, self.bus, health.view)
        table: list[tuple[str, str, asgi.App]] = [
            ("GET", "/", static.page),
            ("GET", "/static/{name:path}", static.file),
            ("GET", "/health", health.health),
            ("GET", "/ready", health.ready),
            ("GET", "/engine", health.engine),
            ("GET", "/v1/models", models.all),
            ("GET", "/v1/models/{id:path}", models.one),
            *(("POST", each.path, InferenceRoute(each, self.forwarder, settings)) for each in PROTOCOLS),
            ("POST", "/admin/workers/{id:path}/restart", workers.restart),
            ("GET", "/admin/events", workers.events),
        ]
        return [Route(path, _Endpoint(app), methods=[method]) for method, path, app in table]

    def start(self) -> None:
        """Load the model, without waiting for it."""
        self.pool.start()

    def close(self) -> None:
        """Take nothing new: who waits is answered, event streams end, running answers go on."""
        self.pool.close()
        self._publish()
        self.bus.close()

    async def stop(self) -> None:
        """Returns when no worker is left."""
        self.close()
        await self.pool.stop()

    def _publish(self) -> None:
        self.bus.publish("state", self.health.view())


class _Endpoint:
    """Starlette takes a plain function for a request handler; an object with `__call__` is an ASGI app."""

    def __init__(self, app: asgi.App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
