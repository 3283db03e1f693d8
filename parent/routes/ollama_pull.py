"""Ollama's `POST /api/pull`: a pull of ours, told in its lines."""

from collections.abc import Awaitable, Callable

import msgspec

from parent.bus import Bus
from parent.config import Settings
from parent.jobs.queue import JobQueue
from parent.jobs.states import TERMINAL, State
from parent.jobs.store import Job
from parent.protocols.base import PLAIN
from parent.protocols.ollama import fields as ollama_fields
from parent.protocols.ollama import formats as ollama
from parent.protocols.ollama import models as ollama_models
from parent.protocols.ollama.errors import ErrorBody
from parent.protocols.ollama.models import Progress, PullBody
from shared import asgi
from shared.errors import ErrorCode, Failure, Refused

MOST_BYTES = 64 * 1024
Begin = Callable[..., Awaitable[Job]]


class OllamaPull:
    """The route. `begin` begins a pull, or joins one that is under way; `settings` gives those in force now."""

    def __init__(self, jobs: JobQueue, bus: Bus, begin: Begin, settings: Callable[[], Settings]) -> None:
        self.jobs = jobs
        self.bus = bus
        self.begin = begin
        self.settings = settings

    async def pull(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`POST /api/pull`: the download is a job, which goes on when the client leaves."""
        asked = ollama_fields.parse(await self._body(scope, receive), PullBody, PLAIN)
        after = self.bus.last_id
        job = await self.begin(ollama_models.hub_name(asked.named), join=True)

        async def whole() -> None:
            end = await self._follow(job.id, after, _nothing)
            failure = _failure(end)
            if failure is not None:
                raise Refused(failure)
            await asgi.respond(send, 200, msgspec.json.encode(Progress("success")))

        async def lines() -> None:
            await asgi.start(send, 200, [(b"content-type", ollama.MEDIA_TYPE)])

            async def tell(progress: Progress) -> None:
                await asgi.send_chunk(send, msgspec.json.encode(progress) + b"\n")

            await tell(Progress("pulling manifest"))
            failure = _failure(await self._follow(job.id, after, tell))
            last = Progress("success") if failure is None else ErrorBody(failure.message)
            await asgi.send_chunk(send, msgspec.json.encode(last) + b"\n", more=False)

        await asgi.run_until_gone(receive, whole if asked.stream is False else lines)

    async def _body(self, scope: asgi.Scope, receive: asgi.Receive) -> bytes:
        return await asgi.read_body(receive, MOST_BYTES, silence_s=self.settings().request_wait_s)

    async def _follow(self, job_id: str, after: int, tell: Callable[[Progress], Awaitable[None]]) -> Job:
        """What a job does, until it is over; how it ended."""
        job = await self.jobs.get(job_id)
        events = self.bus.subscribe(after)
        while job.state not in TERMINAL and job.state != State.PAUSED:
            event = await anext(events, None)
            if event is None:  # the server leaves; the job goes on after the next start
                break
            if event.kind != "job" or event.data["id"] != job_id:
                continue
            job = await self.jobs.get(job_id)
            if job.state == State.RUNNING and job.total:
                stage = f"pulling {job.stage}".strip()
                await tell(Progress(stage, job_id, job.total, min(job.done, job.total)))
        return job


async def _nothing(progress: Progress) -> None:
    """Nobody watches."""


def _failure(job: Job) -> Failure | None:
    """Why a pull brought nothing; None where it is done."""
    if job.state == State.DONE:
        return None
    return job.failure or Failure(
        ErrorCode.CONFLICT, f"the pull {job.id} is {job.state}; see GET /admin/pulls"
    )
