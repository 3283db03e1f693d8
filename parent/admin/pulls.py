"""Operators' routes for pulls: begin one, watch it, pause it, go on, give it up."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs import kinds
from parent.jobs.pulls import model_of, spec_of, written
from parent.jobs.queue import JobQueue
from parent.jobs.states import ACTIVE, State
from parent.jobs.store import Job, no_such_job
from parent.jobs.view import view
from shared import asgi
from shared.errors import ErrorCode, Refused
from shared.jobs import PullRepo

MOST_BYTES = 64 * 1024
KIND = kinds.tag_of(PullRepo(repo=""))


class Asked(msgspec.Struct, frozen=True):
    """The body of `POST /admin/pulls`."""

    model: str  # org/name or org/name@revision


class Pulls:
    """`/admin/pulls` and below. `settings` gives those in force now."""

    def __init__(self, queue: JobQueue, settings: Callable[[], Settings]) -> None:
        self.queue = queue
        self.settings = settings

    async def create(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """202 with the job. A paused pull of the same goes on; a running one is a conflict that names it."""
        asked = await read_json(
            receive,
            Asked,
            MOST_BYTES,
            silence_s=self.settings().request_wait_s,
            shape='{"model": "ORG/NAME[@REVISION]"}',
        )
        await _answer(send, await self.begin(asked.model), 202)

    async def begin(self, model: str, *, join: bool = False) -> Job:
        """The pull of `org/name[@revision]`; a paused one goes on. `join`: one that is under way will do.

        Raises `Refused`.
        """
        spec = spec_of(model, self.settings(), os.environ, Path.home())
        try:
            return await self.queue.submit(spec)
        except Refused as refused:
            if refused.failure.code is not ErrorCode.CONFLICT:
                raise
            if (paused := await self._same(spec, {State.PAUSED})) is not None:
                return await self.queue.resume(paused.id)
            under_way = await self._same(spec, {State.QUEUED, *ACTIVE}) if join else None
            if under_way is None:
                raise
            return under_way

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Newest first."""
        jobs = await self.queue.list(kind=KIND)
        await asgi.respond(send, 200, msgspec.json.encode({"jobs": [_view(job) for job in jobs]}))

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _answer(send, await self._pull(scope), 200)

    async def cancel(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What is verified stays in the cache."""
        await _answer(send, await self.queue.cancel((await self._pull(scope)).id), 202)

    async def pause(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _answer(send, await self.queue.pause((await self._pull(scope)).id), 202)

    async def resume(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _answer(send, await self.queue.resume((await self._pull(scope)).id), 202)

    async def _pull(self, scope: asgi.Scope) -> Job:
        job_id = scope["path_params"]["id"]
        job = await self.queue.get(job_id)
        if job.kind != KIND:
            raise no_such_job(job_id)
        return job

    async def _same(self, spec: PullRepo, states: set[State]) -> Job | None:
        """The pull of the same repository and revision in one of these states."""
        for job in await self.queue.store.find(kind=KIND, states=states, limit=-1):
            if model_of(job).lower() == written(spec).lower():
                return job
        return None


def _view(job: Job) -> dict[str, Any]:
    return {"model": model_of(job), **view(job)}


async def _answer(send: asgi.Send, job: Job, status: int) -> None:
    await asgi.respond(send, status, msgspec.json.encode({"job": _view(job)}))
