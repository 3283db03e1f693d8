"""Routes of jobs: look at them, follow one, and say what is to become of it. None needs a model's worker."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from parent.jobs.queue import JobQueue
from parent.jobs.states import State
from parent.jobs.store import Job, JobEventRow
from parent.jobs.view import event_view
from parent.protocols import sse
from shared import asgi
from shared.errors import ErrorCode, Refused, refuse

MOST = 1000
USUAL = 50
PAGE = 200  # lines of a log
KEEPALIVE_S = 15.0
RETRY_MS = 1500
ONE_READ = 500  # events that a stream reads at once


class JobRoutes:
    """`/api/jobs` and below. `POST /api/jobs` is in `parent/admin/lab.py`."""

    def __init__(self, queue: JobQueue) -> None:
        self.queue = queue

    # ------------------------------------------------------------ looking

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Newest first, `?limit=` of them (50), of one `?kind=` and in one `?state=`."""
        query = _query(scope)
        wanted = query.get("state", "")
        if wanted and wanted not in frozenset(State):
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"state must be one of {', '.join(State)}, not {wanted[:40]!r}",
                param="state",
            )
        states = {State(wanted)} if wanted else frozenset(State)
        limit = _number(query, "limit", USUAL, 1, MOST)
        jobs = await self.queue.list(limit=limit, kind=query.get("kind", ""), states=states)
        await _answer(send, {"ok": True, "jobs": [self.queue.view(job) for job in jobs]})

    async def one(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        job = await self.queue.get(scope["path_params"]["id"])
        await _answer(send, {"ok": True, "job": self.queue.view(job)})

    async def log(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What the job told, oldest first: `?limit=` events (200) after that of id `?after=`. `next`: to go on from."""
        await self._page(scope, send, "events")

    async def metrics(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """All that was measured, paged like the log. Of a step that was taken twice the last one counts."""
        await self._page(scope, send, "metrics", "metric")

    async def _page(self, scope: asgi.Scope, send: asgi.Send, name: str, *kinds: str) -> None:
        query, job_id = _query(scope), scope["path_params"]["id"]
        after = _number(query, "after", 0, 0, 1 << 62)
        limit = _number(query, "limit", PAGE, 1, MOST)
        await self.queue.get(job_id)
        rows = await self.queue.store.events(job_id, after, kinds=kinds, limit=limit)
        shown = [event_view(row) for row in rows]
        last = rows[-1].seq if rows else after
        await _answer(send, {"ok": True, name: shown, "next": last, "more": len(rows) == limit})

    # ------------------------------------------------------------ following

    async def stream(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Server-sent events: what the job has told since `Last-Event-ID` (or `?after=`), then what it tells, each with
        its id; between them `progress` with the job as it is now; at last `end`.
        """
        job_id = scope["path_params"]["id"]
        after = _last_event_id(scope)
        await self.queue.get(job_id)

        async def work() -> None:
            await asgi.start(send, 200, sse.HEADERS)
            await asgi.send_chunk(send, b"retry: %d\n\n" % RETRY_MS)
            await self._follow(job_id, after, send)
            await asgi.send_chunk(send, b"", more=False)

        await asgi.run_until_gone(receive, work)

    async def _follow(self, job_id: str, after: int, send: asgi.Send) -> None:
        shown: dict[str, Any] | None = None
        while True:
            news = self.queue.news  # before the look: nothing falls between
            try:
                job, rows = await self._look(job_id, after)
            except Refused:  # it was deleted, or the server leaves
                return
            for row in rows:
                after = row.seq
                told = event_view(row)
                await asgi.send_chunk(send, sse.named(row.kind, told, row.seq))
            if len(rows) == ONE_READ:
                continue
            view = self.queue.view(job)
            if job.is_over:
                await asgi.send_chunk(send, sse.named("end", view))
                return
            if view != shown:
                shown = view
                await asgi.send_chunk(send, sse.named("progress", view))
            if self.queue.is_closing:
                return
            while not news.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_S):
                        await news.wait()
                if not news.is_set():
                    await asgi.send_chunk(send, sse.KEEP_ALIVE)

    async def _look(self, job_id: str, after: int) -> tuple[Job, list[JobEventRow]]:
        """The row first: an end that it tells of has its events in the store by then."""
        job = await self.queue.get(job_id)
        return job, await self.queue.store.events(job_id, after, limit=ONE_READ)

    # ------------------------------------------------------------ saying

    async def cancel(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._say(scope, send, self.queue.cancel)

    async def pause(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Until `resume`; the job saves where it is first."""
        await self._say(scope, send, self.queue.pause)

    async def resume(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._say(scope, send, self.queue.resume)

    async def retry(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """A new job like one that failed, from its last checkpoint on."""
        await self._say(scope, send, self.queue.retry)

    async def pin(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._say(scope, send, lambda job_id: self.queue.pin(job_id, True), 200)

    async def unpin(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._say(scope, send, lambda job_id: self.queue.pin(job_id, False), 200)

    async def delete(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Forget one that is over; what it made stays."""
        job_id = scope["path_params"]["id"]
        await self.queue.delete(job_id)
        await _answer(send, {"ok": True, "id": job_id, "deleted": True})

    async def _say(
        self, scope: asgi.Scope, send: asgi.Send, word: Callable[[str], Awaitable[Job]], status: int = 202
    ) -> None:
        job = await word(scope["path_params"]["id"])
        await _answer(send, {"ok": True, "job": self.queue.view(job)}, status)


def _query(scope: asgi.Scope) -> dict[str, str]:
    """The last of each parameter."""
    found = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return {name: values[-1] for name, values in found.items()}


def _number(query: dict[str, str], name: str, usual: int, least: int, most: int) -> int:
    text = query.get(name, str(usual))
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not least <= int(text) <= most:
        bound = f"{least} to {most}" if most < 1 << 62 else f"at least {least}"
        raise refuse(ErrorCode.INVALID_REQUEST, f"{name} must be {bound}, not {text[:40]!r}", param=name)
    return int(text)


def _last_event_id(scope: asgi.Scope) -> int:
    """Of the header where it is a number; else of `?after=`. What is no number of ours means the beginning."""
    given = next((value for name, value in scope["headers"] if name == b"last-event-id"), b"")
    if given.isdigit() and len(given) <= 18:
        return int(given)
    return _number(_query(scope), "after", 0, 0, 1 << 62)


async def _answer(send: asgi.Send, body: dict[str, Any], status: int = 200) -> None:
    await asgi.respond(send, status, msgspec.json.encode(body))
