"""The job queue and its routes alone, as a server of a data folder: `python -m tests.process.serve_jobs DATA_DIR`.

Prints its address once the jobs of an earlier life are taken over. SIGTERM ends it. `GRACE`: seconds for which the
processes of jobs work on without it (0).
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.routing import Route, Router

from parent.access import Policy
from parent.admin.jobs import JobRoutes
from parent.admin.lab import LabRoutes
from parent.admin.pulls import Pulls
from parent.bus import Bus
from parent.config import Settings
from parent.db import Database
from parent.instance import Instance
from parent.jobs.policy import policy_of
from parent.jobs.queue import JobQueue
from parent.jobs.retry import Backoff
from parent.keys import Door
from parent.library.library import Library
from parent.library.machine import cpu
from parent.routes.front import Front, not_found
from parent.routes.ollama_pull import OllamaPull
from parent.workers.states import Limits
from shared import asgi, logs


class Endpoint:
    """Starlette takes a plain function for a request handler."""

    def __init__(self, app: asgi.App) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


async def serve(data_dir: Path, instance: Instance) -> None:
    db = Database(data_dir).open()
    backoff = Backoff(first_s=0.05, longest_s=0.2, tries=3)
    bus = Bus()
    settings = Settings(
        data_dir=data_dir,
        disk_floor_bytes=int(os.environ.get("FLOOR", "0")),
        adopt_grace_s=float(os.environ.get("GRACE", "0")),
        hf_cache=os.environ.get("HF_HUB_CACHE") or "none",
    )
    queue = JobQueue(
        db,
        bus.publish,
        backoff=backoff,
        limits=Limits(stop_grace_s=0.5),
        runtime_dir=instance.runtime_dir,
        policy=lambda: policy_of(settings),
    )
    pulls, jobs = Pulls(queue, lambda: settings), JobRoutes(queue)
    lab = LabRoutes(queue, Library(lambda: settings, dict), cpu(64 << 30), lambda: settings)
    ollama = OllamaPull(queue, bus, pulls.begin, lambda: settings)
    table: list[tuple[str, str, asgi.App]] = [
        ("POST", "/admin/pulls", pulls.create),
        ("GET", "/admin/pulls", pulls.all),
        ("GET", "/admin/pulls/{id}", pulls.one),
        ("DELETE", "/admin/pulls/{id}", pulls.cancel),
        ("POST", "/admin/pulls/{id}/pause", pulls.pause),
        ("POST", "/admin/pulls/{id}/resume", pulls.resume),
        ("POST", "/api/pull", ollama.pull),
        ("GET", "/api/jobs", jobs.all),
        ("POST", "/api/jobs", lab.submit),
        ("GET", "/api/jobs/kinds", lab.kinds),
        ("GET", "/api/jobs/{id}", jobs.one),
        ("DELETE", "/api/jobs/{id}", jobs.delete),
        ("GET", "/api/jobs/{id}/log", jobs.log),
        ("GET", "/api/jobs/{id}/metrics", jobs.metrics),
        ("GET", "/api/jobs/{id}/stream", jobs.stream),
        ("POST", "/api/jobs/{id}/cancel", jobs.cancel),
        ("POST", "/api/jobs/{id}/pause", jobs.pause),
        ("POST", "/api/jobs/{id}/resume", jobs.resume),
        ("POST", "/api/jobs/{id}/retry", jobs.retry),
        ("POST", "/api/jobs/{id}/pin", jobs.pin),
        ("POST", "/api/jobs/{id}/unpin", jobs.unpin),
    ]
    routes = [Route(path, Endpoint(app), methods=[method]) for method, path, app in table]
    front = Front(
        Router(routes=routes, default=not_found, redirect_slashes=False),
        Policy("127.0.0.1", [], "here"),
        Door(data_dir),
    )
    server = uvicorn.Server(
        uvicorn.Config(front, host="127.0.0.1", port=0, lifespan="off", log_config=None, log_level="warning")
    )
    await queue.start()
    await instance.clear_leftovers()
    serving = asyncio.ensure_future(server._serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    instance.announce(url)
    print(url, flush=True)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: (queue.end_watching(), setattr(server, "should_exit", True))
    )
    await serving
    await queue.close()
    await db.close()


if __name__ == "__main__":
    logs.configure("info", json=True)
    with Instance(Path(sys.argv[1])) as claimed:
        asyncio.run(serve(Path(sys.argv[1]), claimed))
