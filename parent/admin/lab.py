"""Routes that begin jobs: one for every kind, and those that the lab's pages ask. None needs a model's worker."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs import forms
from parent.jobs.names import Names
from parent.jobs.queue import JobQueue
from parent.jobs.states import TERMINAL, State
from parent.jobs.store import Job
from parent.library.library import Library
from parent.library.machine import Device
from shared import asgi
from shared.errors import ErrorCode, Refused, refuse

MOST_BYTES = 8 << 20
TRIES = 5  # at a name that is free
UNDER_WAY = frozenset(State) - TERMINAL
Body = dict[str, Any]


class LabRoutes:
    """`POST /api/jobs`, `GET /api/jobs/kinds`, `POST /api/{quantize,finetune,dataset}/submit`."""

    def __init__(
        self, queue: JobQueue, library: Library, device: Device, settings: Callable[[], Settings]
    ) -> None:
        self.queue = queue
        self.library = library
        self.device = device
        self.settings = settings

    async def kinds(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What can be submitted, with the JSON schema of each form."""
        await asgi.respond(send, 200, msgspec.json.encode({"ok": True, "kinds": forms.schemas()}))

    async def submit(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """A job of the kind that the body names; its fields stand beside `kind`, or in `spec`. 202 with the job."""
        body = await self._body(receive)
        kind = body.pop("kind", "")
        if isinstance(body.get("spec"), dict) and len(body) == 1:
            body = body["spec"]
        if not isinstance(kind, str) or not kind:
            raise refuse(ErrorCode.INVALID_REQUEST, "kind: is missing; see GET /api/jobs/kinds", param="kind")
        job = await self._queued(kind, body)
        await asgi.respond(send, 202, msgspec.json.encode({"ok": True, "job": self.queue.view(job)}))

    async def quantize(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._submit("quantize", receive, send, "output_dir")

    async def finetune(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._submit("finetune", receive, send, "adapter_path")

    async def dataset(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._submit("dataset", receive, send, "output_dir")

    async def _submit(self, kind: str, receive: asgi.Receive, send: asgi.Send, output: str) -> None:
        job = await self._queued(kind, await self._body(receive))
        answer = {"ok": True, "job_id": job.id, output: job.output}
        await asgi.respond(send, 200, msgspec.json.encode(answer))

    async def _queued(self, kind: str, body: Body) -> Job:
        forms.form_of(kind)
        await self.library.refresh()
        for tries_left in reversed(range(TRIES)):
            promised = [job.output for job in await self.queue.list(limit=-1, states=UNDER_WAY) if job.output]
            names = Names(self.library, self.settings(), promised=promised)
            order = await asyncio.to_thread(forms.order_of, kind, body, names, self.device)
            try:
                return await self.queue.submit(order.spec, output=order.output, needs=order.needs)
            except Refused as refused:  # somebody got the made-up name meanwhile
                is_taken = refused.failure.code is ErrorCode.CONFLICT
                if not is_taken or body.get(forms.NAME) or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _body(self, receive: asgi.Receive) -> Body:
        silence_s = self.settings().request_wait_s
        return await read_json(
            receive, dict[str, Any], MOST_BYTES, silence_s=silence_s, shape="a JSON object"
        )
