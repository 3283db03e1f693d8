"""The job queue: runs what the store holds, a few at a time, each in a worker process of its own.

Whatever happens to a job goes through the store first (table J decides), then to the process. A parent that is killed
leaves its rows behind; the next one finds by pid and start time that their owner is dead, and queues them again where
their kind can go on.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from parent.db import Database
from parent.jobs import kinds, retry
from parent.jobs.evaluations import RESULT
from parent.jobs.pulls import pulled
from parent.jobs.run import SILENCE_S, run_job
from parent.jobs.states import Event, IllegalTransition, State
from parent.jobs.store import Job, Jobs, Owner
from parent.jobs.view import view
from parent.library.hf_cache import forget_parts
from parent.workers.states import Limits
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.jobs import JobDone, JobEvent, JobLog, JobSpec, JobStage, JobStarted
from shared.logs import event

log = logging.getLogger(__name__)
MAX_RUNNING = 2
ROW_S = 1.0  # between two updates of a row's progress
KEPT_S = 90 * 86400.0
KEPT_JOBS = 10_000
_SAME_START_S = 1.0  # two readings of one process's start time differ by no more


class JobQueue:
    """`start` it, `close` it. `publish` gets ("job", its view) at every change, progress at most once a second;
    `on_done` each job that made something, once its row says so.
    """

    def __init__(
        self,
        db: Database,
        publish: Callable[[str, Any], None] = lambda kind, data: None,
        *,
        on_done: Callable[[Job], None] = lambda job: None,
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        silence_s: float = SILENCE_S,
        backoff: retry.Backoff = retry.Backoff(),  # noqa: B008  (a tuple)
        max_running: int = MAX_RUNNING,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = Jobs(db, clock)
        self._publish = publish
        self._on_done = on_done
        self._command, self._env = worker_command, worker_env
        self._limits, self._silence_s, self._backoff = limits, silence_s, backoff
        self._max_running = max_running
        self._clock = clock
        self._owner = Owner(os.getpid(), psutil.Process().create_time())
        self._running: dict[str, _Run] = {}
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._admitting: asyncio.Task[Job | None] | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Take over what a dead parent left, then run what is queued."""
        await self.store.prune(older_than_s=KEPT_S, keep=KEPT_JOBS)
        for job in await self.store.active():
            if not self._is_owned_elsewhere(job):
                said = f"interrupted: the server that ran it (pid {job.owner_pid}) is gone"
                moved = await self._apply(job.id, Event.ORPHANED, error=_encoded(_unavailable(said)))
                event(log, "job.orphaned", job=job.id, was=job.state, now=moved.state)
        self._scheduler = asyncio.create_task(self._schedule())

    async def close(self) -> None:
        """End every worker; resumable jobs are queued again, for the next start. Then nothing is taken."""
        self._closing = True
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
        if self._admitting is not None:
            await asyncio.gather(self._admitting, return_exceptions=True)
        ended = [run.ended for run in self._running.values()]
        for job_id in list(self._running):
            said = "interrupted: the server was stopped"
            with contextlib.suppress(IllegalTransition, Refused):
                await self._apply(job_id, Event.YIELDED, error=_encoded(_unavailable(said)))
            self._stop(job_id)
        await asyncio.gather(*ended, *self._clearing, return_exceptions=True)

    async def submit(self, spec: JobSpec, *, output: str = "", rerun_of: str | None = None) -> Job:
        """Queue a job. Raises `Refused` (conflict) naming the one that is at the same thing."""
        if self._closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is leaving")
        job = await self.store.create(spec, output=output, rerun_of=rerun_of)
        self._tell(job)
        self._wake.set()
        return job

    async def get(self, job_id: str) -> Job:
        """Raises `Refused` (not_found)."""
        return await self.store.get(job_id)

    async def list(self, *, limit: int = 50, kind: str = "") -> list[Job]:
        """Newest first."""
        return await self.store.find(limit=limit, kind=kind)

    async def cancel(self, job_id: str) -> Job:
        """For good; what a pull has verified stays. Raises `Refused` (not_found; conflict: it is over)."""
        return await self._told(job_id, Event.CANCEL)

    async def pause(self, job_id: str) -> Job:
        """Until `resume`, across restarts. Raises `Refused` (not_found, unsupported, conflict)."""
        return await self._told(job_id, Event.PAUSE)

    async def resume(self, job_id: str) -> Job:
        """Queue a paused job again; one that waits to be retried is tried at once. Raises as `pause`."""
        return await self._told(job_id, Event.RESUME)

    async def _told(self, job_id: str, word: Event) -> Job:
        """An operator's word."""
        try:
            job = await self._apply(job_id, word)
        except IllegalTransition:
            job = await self.store.get(job_id)
            if word is Event.PAUSE and not kinds.kind_of(job.kind).resumable and not job.is_over:
                raise refuse(
                    ErrorCode.UNSUPPORTED, f"a job of kind {job.kind} cannot be paused; cancel it"
                ) from None
            raise refuse(ErrorCode.CONFLICT, f"{job_id} is {job.state}: there is nothing to {word}") from None
        if job.state is State.STOPPING:
            self._stop(job_id)
        self._wake.set()
        return job

    def _stop(self, job_id: str) -> None:
        if (run := self._running.get(job_id)) is not None:
            run.stop()

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            if len(self._running) < self._max_running:
                try:
                    job = await self._admit()
                    delay = await self.store.next_retry_s() if job is None else 0.0
                except Refused as refused:  # the disk is full, say: rows wait
                    event(log, "job.not_admitted", level=logging.ERROR, error=str(refused))
                    job, delay = None, ROW_S
                if job is not None:
                    continue
            else:
                delay = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    async def _admit(self) -> Job | None:
        """Shielded: a row that is starting must get its run, whoever cancels the scheduler."""

        async def admit() -> Job | None:
            job = await self.store.admit_next(self._owner)
            if job is not None:
                self._running[job.id] = run = _Run(self, job)
                run.ended = asyncio.create_task(run.run())
                self._tell(job)
            return job

        self._admitting = asyncio.create_task(admit())
        return await asyncio.shield(self._admitting)

    def _is_owned_elsewhere(self, job: Job) -> bool:
        """A live process other than this one owns it. A row of ours from before an exec in place is an orphan."""
        if job.owner_pid is None or job.owner_started is None or job.owner_pid == self._owner.pid:
            return False
        try:
            started = psutil.Process(job.owner_pid).create_time()
        except psutil.Error:
            return False
        return abs(started - job.owner_started) <= _SAME_START_S

    async def _apply(self, job_id: str, what: Event, *, transient: bool = False, **changes: Any) -> Job:
        job = await self.store.apply(job_id, what, transient=transient, **changes)
        self._tell(job)
        return job

    def _tell(self, job: Job) -> None:
        self._publish("job", view(job))
        if job.state is State.DONE:
            self._on_done(job)
        elif job.state is State.CANCELLED and (spec := pulled(job)) is not None:
            clearing = asyncio.create_task(asyncio.to_thread(forget_parts, Path(spec.cache_dir), spec.repo))
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)


class _Run:
    """One job between `admit` and `exit`: its process, and what that says, in order into the store."""

    def __init__(self, queue: JobQueue, job: Job) -> None:
        self.queue = queue
        self.job = job
        self.ended: asyncio.Task[None]
        self._inbox: asyncio.Queue[JobEvent | Failure | None] = asyncio.Queue()
        self._process: asyncio.Task[JobDone] | None = None
        self._stopped = False
        self._stage = ""
        self._growth = retry.Growth(kinds.kind_of(job.kind).grows)

    def stop(self) -> None:
        """Begin the stop ladder; the row says already what becomes of the job."""
        self._stopped = True
        if self._process is not None:
            self._process.cancel()

    async def run(self) -> None:
        """Returns when no process is left and the row says how it went."""
        queue, job = self.queue, self.job
        failure: Failure | None = None
        try:
            with contextlib.suppress(Refused):
                if (await queue.store.get(job.id)).state is State.STOPPING:
                    self._stopped = True  # the word came between the row and this run
            if not self._stopped:
                event(log, "job.started", job=job.id, kind=job.kind, attempt=job.attempt)
                self._process = asyncio.ensure_future(self._work())
                pump = asyncio.create_task(self._pump())
                await asyncio.wait({self._process})
                self._inbox.put_nowait(None)
                await pump
                failure = _failure_of(self._process)
            await self._exit(failure)
        finally:
            del queue._running[job.id]
            queue._wake.set()

    async def _work(self) -> JobDone:
        queue, job = self.queue, self.job
        try:
            spec = kinds.decode_spec(job.spec)
        except msgspec.MsgspecError as error:
            said = f"this version of mlxd cannot run {job.id} of kind {job.kind}: {error}"
            raise refuse(ErrorCode.UNSUPPORTED, said) from None
        return await run_job(
            spec,
            job.output,
            job_id=job.id,
            on_event=self._inbox.put_nowait,
            on_fault=self._inbox.put_nowait,
            worker_command=queue._command,
            worker_env=queue._env,
            limits=queue._limits,
            silence_s=queue._silence_s,
        )

    async def _pump(self) -> None:
        """What the worker says, into the store. Nothing it says can end the job but by table J."""
        latest: JobStage | None = None
        loop = asyncio.get_running_loop()
        written_at = -ROW_S
        while True:
            news: JobEvent | Failure | None = None
            try:
                async with asyncio.timeout_at(written_at + ROW_S if latest else None):
                    news = await self._inbox.get()
            except TimeoutError:
                await self._progress(latest)
                latest, written_at = None, loop.time()
                continue
            if isinstance(news, JobStage):
                self._growth.see(news)
                if news.stage != self._stage:
                    await self._progress(latest)
                    await self._note("stage", {"stage": news.stage, "total": news.total})
                    self._stage, written_at = news.stage, -ROW_S
                latest = news
                if loop.time() >= written_at + ROW_S:
                    await self._progress(latest)
                    latest, written_at = None, loop.time()
                continue
            await self._progress(latest)
            latest = None
            match news:
                case None:
                    return
                case JobStarted():
                    await self._write(Event.STARTED)
                case JobLog(line=line):
                    await self._note("log", {"line": line})
                case JobDone():
                    if news.result:  # before the row says so: who sees it done finds it
                        await self._note(RESULT, news.result)
                    await self._write(Event.DONE, output=news.output, message=news.summary)
                case Failure():
                    transient, changes = self._judge(news)
                    await self._write(Event.DEADLINE, transient=transient, **changes)

    async def _progress(self, latest: JobStage | None) -> None:
        if latest is None:
            return
        counts: dict[str, Any] = {"stage": latest.stage, "done": latest.done, "total": latest.total}
        if self._growth.grew:
            counts["orphaned"] = 0  # a server that dies now was not killed by this job
        await self._write(Event.PROGRESS, message=latest.message, **counts)

    async def _note(self, kind: str, data: dict[str, Any]) -> None:
        try:
            await self.queue.store.note(self.job.id, kind, data)
        except Refused as refused:
            event(log, "job.not_written", level=logging.ERROR, job=self.job.id, error=str(refused))

    async def _write(self, what: Event, *, transient: bool = False, **changes: Any) -> None:
        try:
            await self.queue._apply(self.job.id, what, transient=transient, **changes)
        except IllegalTransition as error:  # a worker that says things out of order
            event(log, "job.out_of_order", level=logging.WARNING, job=self.job.id, error=str(error))
        except Refused as refused:
            event(log, "job.not_written", level=logging.ERROR, job=self.job.id, error=str(refused))

    async def _exit(self, failure: Failure | None) -> None:
        """The last event, which must reach the row: while the disk is full it is tried again."""
        queue, job_id = self.queue, self.job.id
        transient, changes = self._judge(failure) if failure else (False, {})
        while True:
            try:
                ended = await queue._apply(job_id, Event.EXIT, transient=transient, **changes)
                break
            except Refused as refused:
                event(log, "job.not_written", level=logging.ERROR, job=job_id, error=str(refused))
                if queue._closing:
                    return  # the next start finds the row, and that its owner is gone
                await asyncio.sleep(ROW_S)
        event(log, "job.left", job=job_id, state=ended.state, error=ended.error)

    def _judge(self, failure: Failure) -> tuple[bool, dict[str, Any]]:
        """Whether the job shall be tried again, and what its row then says."""
        changes: dict[str, Any] = {"error": _encoded(failure)}
        if not kinds.kind_of(self.job.kind).resumable:
            return False, changes
        again = retry.after(failure, self.job.fruitless, grew=self._growth.grew, backoff=self.queue._backoff)
        changes["fruitless"] = again.fruitless
        if again.delay_s is not None:
            changes["retry_at"] = self.queue._clock() + again.delay_s
        return again.delay_s is not None, changes


def _failure_of(work: "asyncio.Task[JobDone]") -> Failure | None:
    """Why it did not end well; None where it did, or was stopped."""
    if work.cancelled():
        return None
    error = work.exception()
    if error is None:
        return None
    if isinstance(error, Refused):
        return error.failure
    log.error("job.bug", exc_info=error)
    return Failure(ErrorCode.INTERNAL, f"a bug in the server: {type(error).__name__}: {error}")


def _unavailable(said: str) -> Failure:
    return Failure(ErrorCode.ENGINE_UNAVAILABLE, said)


def _encoded(failure: Failure) -> str:
    return msgspec.json.encode(failure).decode()
