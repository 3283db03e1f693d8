"""The composition root: every object is built here once, and every route is visible here."""

import asyncio
import logging
import platform
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Route, Router

from parent.access import Policy
from parent.admin.config import Config
from parent.admin.jobs import JobRoutes
from parent.admin.lab import LabRoutes
from parent.admin.memory import Memory
from parent.admin.pulls import Pulls
from parent.admin.quarantine import Quarantine
from parent.admin.restart import Restart
from parent.admin.storage import Storage
from parent.admin.workers import Workers
from parent.bus import Bus
from parent.db import Database
from parent.inference.background import Background
from parent.inference.forward import Forwarder
from parent.inference.history import History
from parent.jobs.evaluations import Evaluations
from parent.jobs.policy import policy_of as job_policy
from parent.jobs.queue import JobQueue
from parent.jobs.store import Job
from parent.keys import Door
from parent.library.hub_token import HubToken
from parent.library.library import Library
from parent.library.machine import Device
from parent.live_config import Change, LiveConfig
from parent.openapi.document import document, index
from parent.pool.pool import Pool
from parent.protocols import PROTOCOLS
from parent.routes.adapters import AdapterRoutes
from parent.routes.datasets import DatasetRoutes
from parent.routes.embeddings import EmbeddingRoutes
from parent.routes.evaluations import EvaluationRoutes
from parent.routes.front import Front, not_found
from parent.routes.health import Health
from parent.routes.inference import InferenceRoute
from parent.routes.models import Models
from parent.routes.ollama import OllamaRoutes
from parent.routes.ollama_pull import OllamaPull
from parent.routes.openapi import OpenApi
from parent.routes.push import PushRoutes
from parent.routes.responses import ResponsesRoutes
from parent.routes.static import Static
from parent.routes.text import TextRoutes
from parent.workers.runtime_file import RuntimeRecord
from shared import asgi
from shared.errors import Refused
from shared.logs import event

log = logging.getLogger(__name__)
QUEUE_EVENTS_S = 0.25


class Application:
    """The parent without its listener: `asgi` is the app, `start` loads models, `stop` ends the workers.

    `default`: id of the model that a request without a name means, and that is loaded at start ("" = none).
    """

    def __init__(
        self,
        live: LiveConfig,
        library: Library,
        device: Device,
        *,
        runtime_dir: Path,
        restart: Restart | None = None,
        default: str = "",
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        settings = live.settings
        self.live = live
        self.library = library
        self.device = device
        self._worker_command, self._worker_env = worker_command, worker_env
        self.bus = Bus()
        self.db = Database(settings.data_dir)
        self.history = History(self.db, lambda: (live.settings.history_bytes, live.settings.history_ttl_s))
        self.token = HubToken(settings.data_dir)
        self._jobs_env = {**(worker_env or {}), **self.token.env()}  # the queue looks into it at every start
        self.evaluations = Evaluations(self.db)
        self.pool = Pool(
            library,
            settings,
            device,
            runtime_dir=runtime_dir,
            default=default,
            worker_command=worker_command,
            worker_env=worker_env,
            on_change=self._publish,
            on_queue=self._queue_moved,
        )
        self.jobs = JobQueue(
            self.db,
            self.bus.publish,
            on_done=self._job_done,
            worker_command=worker_command,
            worker_env=self._jobs_env,
            runtime_dir=runtime_dir,
            policy=lambda: job_policy(live.settings),
            places=self.pool.berths,
        )
        self._queue_timer: asyncio.TimerHandle | None = None
        self.forwarder = Forwarder(self.pool)
        self.background = Background()
        self.health = Health(self.pool, restart.boot if restart else secrets.token_hex(8), self.history)
        self._restart = restart
        self._tasks: set[asyncio.Task[Any]] = set()
        self.asgi = Front(
            Router(routes=self._routes(), default=not_found, redirect_slashes=False),
            Policy(settings.host, settings.allowed_hosts, platform.node()),
            Door(settings.data_dir),
        )
        live.checks.append(lambda resolved: self.pool.roster.check_pins(resolved.settings, resolved.models))
        live.checks.append(lambda resolved: self.pool.roster.check_names(resolved.models))
        live.on_change.append(self._settings_changed)

    def _routes(self) -> list[BaseRoute]:
        health, static = self.health, Static()
        models = Models(self.pool, created=int(time.time()))
        adapters = AdapterRoutes(
            self.pool,
            lambda: self.live.settings,
            worker_command=self._worker_command,
            worker_env=self._worker_env,
        )
        text = TextRoutes(self.pool)
        reading = EmbeddingRoutes(self.pool)
        responses = ResponsesRoutes(self.forwarder, self.history, self.background)
        workers = Workers(self.pool, self.bus, health.view)
        memory, config = Memory(self.pool), Config(self.live, self.pool.roster.known)
        quarantine = Quarantine(self.forwarder.quarantine)
        pulls, jobs = Pulls(self.jobs, lambda: self.live.settings), JobRoutes(self.jobs)
        lab = LabRoutes(self.jobs, self.library, self.device, lambda: self.live.settings)
        ollama, openapi = OllamaRoutes(self.forwarder), OpenApi(document, index)
        ollama_pull = OllamaPull(self.jobs, self.bus, pulls.begin, lambda: self.live.settings)
        datasets, push = DatasetRoutes(), PushRoutes(self.jobs, lambda: self.live.settings, self.token)
        evaluations = EvaluationRoutes(self.evaluations, self.jobs, self.pool, lambda: self.live.settings)
        storage = Storage(self.pool, self.jobs, lambda: self.live.settings, self.token, self._token_changed)
        table: list[tuple[str, str, asgi.App]] = [
            ("GET", "/", static.page),
            ("GET", "/static/{name:path}", static.file),
            ("GET", "/health", health.health),
            ("GET", "/ready", health.ready),
            ("GET", "/engine", health.engine),
            ("GET", "/running", health.running),
            ("GET", "/stats", workers.stats),
            ("GET", "/openapi.json", openapi.whole),
            ("GET", "/v1", openapi.under),
            ("GET", "/v1/models", models.all),
            ("GET", "/v1/adapters", adapters.all),
            ("GET", "/v1/adapters/available", adapters.available),
            ("POST", "/v1/adapters/mount", adapters.mount),
            ("POST", "/v1/adapters/unmount", adapters.unmount),
            ("POST", "/v1/models/{id:path}/load", models.load),
            ("POST", "/v1/models/{id:path}/unload", models.unload),
            ("GET", "/v1/models/{id:path}", models.one),
            *(("POST", each.path, InferenceRoute(each, self.forwarder)) for each in PROTOCOLS),
            ("POST", "/v1/responses", responses.create),
            ("POST", "/v1/responses/input_tokens", responses.input_tokens),
            ("GET", "/v1/responses/{id}", responses.one),
            ("DELETE", "/v1/responses/{id}", responses.delete),
            ("POST", "/v1/responses/{id}/cancel", responses.cancel),
            ("GET", "/v1/responses/{id}/input_items", responses.input_items),
            ("POST", "/v1/messages/count_tokens", text.count_tokens),
            ("POST", "/v1/embeddings", reading.embeddings),
            ("POST", "/v1/rerank", reading.rerank),
            ("POST", "/v2/rerank", reading.rerank),
            ("POST", "/rerank", reading.rerank),
            ("POST", "/tokenize", text.tokenize),
            ("POST", "/detokenize", text.detokenize),
            ("POST", "/apply-template", text.apply_template),
            ("POST", "/admin/workers/{id:path}/restart", workers.restart),
            ("POST", "/admin/workers/{id:path}/check", workers.check),
            ("GET", "/admin/workers/{id:path}/cache", workers.cache),
            ("GET", "/admin/events", workers.events),
            ("GET", "/admin/ledger", memory.ledger),
            ("GET", "/admin/fit", memory.fit),
            ("GET", "/admin/config", config.show),
            ("PATCH", "/admin/config", config.patch),
            ("GET", "/admin/quarantine", quarantine.all),
            ("DELETE", "/admin/quarantine/{hash}", quarantine.release),
            ("GET", "/admin/pulls", pulls.all),
            ("POST", "/admin/pulls", pulls.create),
            ("GET", "/admin/pulls/{id}", pulls.one),
            ("DELETE", "/admin/pulls/{id}", pulls.cancel),
            ("POST", "/admin/pulls/{id}/pause", pulls.pause),
            ("POST", "/admin/pulls/{id}/resume", pulls.resume),
            ("POST", "/api/chat", ollama.chat),
            ("POST", "/api/generate", ollama.generate),
            ("POST", "/api/embed", ollama.embed),
            ("POST", "/api/embeddings", ollama.embeddings),
            ("GET", "/api/tags", ollama.tags),
            ("POST", "/api/show", ollama.show),
            ("GET", "/api/ps", ollama.ps),
            ("GET", "/api/version", ollama.version),
            ("POST", "/api/pull", ollama_pull.pull),
            ("POST", "/api/create", ollama.refuse),
            ("POST", "/api/copy", ollama.refuse),
            ("POST", "/api/push", ollama.refuse),
            ("DELETE", "/api/delete", ollama.refuse),
            ("POST", "/api/finetune/merge", adapters.merge),
            ("POST", "/api/finetune/export", adapters.export),
            ("GET", "/api/dataset/templates", datasets.templates),
            ("POST", "/api/quantize/push", push.push),
            ("POST", "/api/finetune/push", push.push),
            ("POST", "/api/dataset/push", push.push),
            ("GET", "/api/evaluations", evaluations.all),
            ("POST", "/api/evaluations", evaluations.create),
            ("GET", "/api/settings/hf-token", storage.token_state),
            ("POST", "/api/settings/hf-token", storage.keep_token),
            ("DELETE", "/api/settings/hf-token", storage.forget_token),
            ("GET", "/api/gc/plan", storage.gc_plan),
            ("POST", "/api/gc/execute", storage.gc_execute),
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
            ("POST", "/api/quantize/submit", lab.quantize),
            ("POST", "/api/finetune/submit", lab.finetune),
            ("POST", "/api/dataset/submit", lab.dataset),
        ]
        if self._restart is not None:
            table += [
                ("GET", "/admin/restart", self._restart.status),
                ("POST", "/admin/restart", self._restart.restart),
            ]
        return [Route(path, _Endpoint(app), methods=[method]) for method, path, app in table]

    async def start(self, leftovers: list[RuntimeRecord]) -> list[RuntimeRecord]:
        """Adopt the workers that an earlier parent left, load what is to be loaded, without waiting for it.

        Returns the records of those that were adopted. Raises `Refused` (cannot_fit) for a pinned set over budget.
        """
        self.pool.roster.check_pins(self.live.settings, self.live.models)
        try:
            self.pool.roster.check_names(self.live.models)
        except Refused as refused:  # a model may have come since that was written: serve, and say so
            event(log, "config.dead_alias", level=logging.WARNING, reason=str(refused))
        self.db.open()
        adopted = await self.pool.start(leftovers)
        await self.jobs.start()
        await self.evaluations.catch_up(self.jobs.store)
        return adopted

    def reload(self) -> None:
        """Read the settings file again, and look for models; a broken file is logged, and changes nothing."""
        try:
            self.live.reload()
        except Refused as refused:
            event(log, "config.refused", level=logging.ERROR, reason=str(refused))
        self._look()

    def _job_done(self, job: Job) -> None:
        """A job has made something, perhaps a model, or measured one."""
        self._look()
        self._soon(self.evaluations.take(job, self.jobs.store))

    def _token_changed(self) -> None:
        self._jobs_env.clear()
        self._jobs_env.update({**(self._worker_env or {}), **self.token.env()})

    def _look(self) -> None:
        self._soon(self.pool.look())

    def _soon(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            event(log, "app.task_failed", level=logging.ERROR, error=f"{type(error).__name__}: {error}")

    def _settings_changed(self, change: Change) -> None:
        self.pool.take_settings(self.live.settings)
        self._publish()

    def close(self) -> None:
        """Take nothing new: who waits is answered, event streams end, running answers go on."""
        self.pool.close()
        self._publish()
        self.bus.close()
        self.jobs.end_watching()

    async def stop(self) -> None:
        """Returns when no worker is left, and everything is written."""
        self.close()
        await self.background.close()
        await asyncio.gather(self.pool.stop(), self.jobs.close())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.db.close()

    def _queue_moved(self) -> None:
        """Who waits and who runs, to `/admin/events`, a few times a second at most."""
        self.jobs.answers(self.pool.desk.is_busy)
        if self._queue_timer is None:
            loop = asyncio.get_running_loop()
            self._queue_timer = loop.call_later(QUEUE_EVENTS_S, self._publish_queue)

    def _publish_queue(self) -> None:
        self._queue_timer = None
        self.bus.publish("queue", self.health.queue())

    def _publish(self) -> None:
        self.bus.publish("state", self.health.view())


class _Endpoint:
    """Starlette takes a plain function for a request handler; an object with `__call__` is an ASGI app."""

    def __init__(self, app: asgi.App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
