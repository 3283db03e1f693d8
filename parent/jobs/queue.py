"""The job queue: runs what the store holds, a few at a time, each in a worker process of its own.

Whatever happens to a job goes through the store first (table J decides), then to the process. A parent that is killed
leaves its rows and the processes of its jobs behind; the next one adopts those that live, takes down what the others
still told, and queues those again whose kind can go on.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from parent.db import Database
from parent.jobs import kinds, retry
from parent.jobs.housekeeping import clear_up, forget, move
from parent.jobs.policy import Places, Policy
from parent.jobs.pulls import pulled
from parent.jobs.run import SILENCE_S
from parent.jobs.runs import ROW_S, Run, Terms
from parent.jobs.states import ACTIVE, Event, IllegalTransition, State
from parent.jobs.store import Job, Jobs, Owner, new_id
from parent.jobs.takeover import adopt, finish
from parent.jobs.turn import Turn
from parent.jobs.view import Aside, view
from parent.library.hf_cache import forget_parts
from parent.workers.runtime_file import JOB_SOCKETS
from parent.workers.states import Limits
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.jobs import JobSpec
from shared.logs import event

log = logging.getLogger(__name__)
MAX_RUNNING = 2  # of those that need no GPU; of the others one
HOUSEKEEPING_S = 3600.0
_SAME_START_S = 1.0  # two readings of one process's start time differ by no more


class JobQueue:
    """`start` it, `close` it. `publish` gets ("job", its view) at every change, progress at most once a second;
    `on_done` each job that made something, once its row says so. `runtime_dir`: of sockets, where processes may be
    adopted. `places`: where jobs on the GPU get their memory; None = they need not ask.
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
        runtime_dir: Path | None = None,
        policy: Callable[[], Policy] = Policy,
        places: Places | None = None,
    ) -> None:
        self.store = Jobs(db, clock)
        self.clock = clock
        self.url = ""  # at which the server answers
        self.is_closing = False
        self.terms = Terms(
            db.path.parent / "jobs", runtime_dir, worker_command, worker_env, limits, silence_s, backoff
        )
        self._publish = publish
        self._on_done = on_done
        self._policy, self._places = policy, places
        self._max_running = max_running
        self._owner = Owner(os.getpid(), psutil.Process().create_time())
        self._running: dict[str, Run] = {}
        self._waits: dict[str, str] = {}  # why queued jobs have not begun
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._admitting: asyncio.Task[Job | None] | None = None
        self._clearing: set[asyncio.Task[Any]] = set()
        self._housekeeper: asyncio.Task[None] | None = None
        self._turn = Turn(policy, self._hold)
        if places is not None:
            places.on_placed = lambda _: self._wake.set()
            places.on_displaced = self._displaced

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Take over what a dead parent left, then run what is queued."""
        await self._clear_up()
        for job in await self.store.active():
            if not self._is_owned_elsewhere(job):
                await self._take_over(job)
        self._remove_old_sockets()
        self._scheduler = asyncio.create_task(self._schedule())
        self._housekeeper = asyncio.create_task(self._keep_house())

    async def close(self) -> None:
        """End every worker; resumable jobs are queued again, for the next start. Then nothing is taken."""
        await self._stop_scheduling()
        ended = [run.ended for run in self._running.values()]
        for job_id in list(self._running):
            with contextlib.suppress(IllegalTransition, Refused):
                await self.apply(job_id, Event.YIELDED, error=_interrupted("the server was stopped"))
            self._stop(job_id)
        await asyncio.gather(*ended, *self._clearing, return_exceptions=True)

    async def suspend(self) -> None:
        """For a restart in place: leave the processes alone, which the new image adopts. Then nothing is taken."""
        if self.terms.runtime_dir is None or self.grace_s <= 0:
            await self.close()
            return
        await self._stop_scheduling()
        ended = [run.ended for run in self._running.values()]
        for run in list(self._running.values()):
            run.let_go()
        await asyncio.gather(*ended, *self._clearing, return_exceptions=True)

    def end_watching(self) -> None:
        """Whoever waits for news is told that there will be none."""
        self.is_closing = True
        self.told()

    async def _stop_scheduling(self) -> None:
        self.end_watching()
        self._turn.close()
        tasks = [task for task in (self._scheduler, self._housekeeper) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._admitting is not None:
            await asyncio.gather(self._admitting, return_exceptions=True)

    async def _take_over(self, job: Job) -> None:
        """A job of a dead parent: adopt its process, or settle what is left of it."""
        run = Run(self, job)
        if job.state is not State.STOPPING and self.grace_s > 0:
            worker = await adopt(job, run)
            if worker is not None:
                await self.store.set(job.id, owner_pid=self._owner.pid, owner_started=self._owner.started)
                if run.uses_gpu and self._places is not None:
                    may_leave = kinds.kind_of(job.kind).resumable
                    self._places.adopt(job.id, job.needs, job.peak_bytes, may_leave=may_leave)
                    run.hold(self._turn.should_wait)
                event(log, "job.adopted", job=job.id, kind=job.kind, pid=worker.process.pid)
                self._begin(run)
                return
        await finish(job, run, self.terms.limits.stop_grace_s)
        job = await self.store.get(job.id)
        if job.state in ACTIVE:
            said = f"interrupted: the server that ran it (pid {job.owner_pid}) is gone"
            moved = await self.apply(job.id, Event.ORPHANED, error=_interrupted(said))
            event(log, "job.orphaned", job=job.id, was=job.state, now=moved.state)

    def _remove_old_sockets(self) -> None:
        """Of processes that are no job's any more."""
        if self.terms.runtime_dir is not None:
            used = {run.socket for run in self._running.values()}
            for path in self.terms.runtime_dir.glob(JOB_SOCKETS):
                if str(path) not in used:
                    path.unlink(missing_ok=True)

    def _is_owned_elsewhere(self, job: Job) -> bool:
        """A live process other than this one owns it. A row of ours from before an exec in place is an orphan."""
        if job.owner_pid is None or job.owner_started is None or job.owner_pid == self._owner.pid:
            return False
        try:
            started = psutil.Process(job.owner_pid).create_time()
        except psutil.Error:
            return False
        return abs(started - job.owner_started) <= _SAME_START_S

    # ------------------------------------------------------------ what people ask

    async def submit(
        self, spec: JobSpec, *, output: str = "", needs: int = 0, rerun_of: str | None = None
    ) -> Job:
        """Queue a job. Raises `Refused`: conflict naming the one that is at the same thing, cannot_fit, unsupported."""
        self._check(spec, needs)
        job = await self.store.create(spec, output=output, needs=needs, rerun_of=rerun_of)
        return self._queued(job)

    async def retry(self, job_id: str) -> Job:
        """A new job like one that ended without success; it goes on from the last checkpoint. Raises `Refused`."""
        old = await self.store.get(job_id)
        if not old.is_over or old.state is State.DONE:
            raise refuse(ErrorCode.CONFLICT, f"{job_id} is {old.state}: there is nothing to retry")
        try:
            spec = kinds.decode_spec(old.spec)
        except msgspec.MsgspecError as error:
            said = f"this version of mlxd cannot run {job_id} of kind {old.kind}: {error}"
            raise refuse(ErrorCode.UNSUPPORTED, said) from None
        self._check(spec, old.needs)
        is_taken = await asyncio.to_thread(Path(old.output).exists) if old.output else False
        if is_taken:
            raise refuse(ErrorCode.CONFLICT, f"{old.output} exists by now; remove it, or submit another job")
        new, root = new_id(), self.terms.folders
        is_moved = await asyncio.to_thread(move, root, job_id, new)
        resume, step = (old.resume, old.saved_step) if is_moved else ("", 0)
        try:
            job = await self.store.create(
                spec,
                output=old.output,
                needs=old.needs,
                rerun_of=job_id,
                job_id=new,
                resume=resume,
                saved_step=step,
            )
        except BaseException:
            await asyncio.to_thread(move, root, new, job_id)
            raise
        return self._queued(job)

    def _check(self, spec: JobSpec, needs: int) -> None:
        if self.is_closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is leaving")
        if not kinds.is_known(type(spec)):
            said = f"this version of mlxd cannot run jobs of kind {kinds.tag_of(spec)}"
            raise refuse(ErrorCode.UNSUPPORTED, said)
        if self._places is not None and (failure := self._places.never_fits(needs)) is not None:
            raise Refused(failure)

    def _queued(self, job: Job) -> Job:
        self._tell(job)
        self._wake.set()
        return job

    async def get(self, job_id: str) -> Job:
        """Raises `Refused` (not_found)."""
        return await self.store.get(job_id)

    async def list(
        self, *, limit: int = 50, kind: str = "", states: Collection[State] = frozenset(State)
    ) -> list[Job]:
        """Newest first."""
        return await self.store.find(limit=limit, kind=kind, states=states)

    def view(self, job: Job) -> dict[str, Any]:
        """The job as clients see it, with what only this server knows."""
        run = self._running.get(job.id)
        waits = self._waits.get(job.id, "") if job.state is State.QUEUED else ""
        is_held = run is not None and run.is_held and job.state is State.RUNNING
        return view(job, Aside(waits, "answers" if is_held else ""))

    async def cancel(self, job_id: str) -> Job:
        """For good; what a pull has verified stays. Raises `Refused` (not_found; conflict: it is over)."""
        return await self._told(job_id, Event.CANCEL)

    async def pause(self, job_id: str) -> Job:
        """Until `resume`, across restarts. Raises `Refused` (not_found, unsupported, conflict)."""
        return await self._told(job_id, Event.PAUSE)

    async def resume(self, job_id: str) -> Job:
        """Queue a paused job again; one that waits to be retried is tried at once. Raises as `pause`."""
        return await self._told(job_id, Event.RESUME)

    async def pin(self, job_id: str, pinned: bool) -> Job:
        """Keep it for ever, or as long as others. Raises `Refused` (not_found)."""
        job = await self.store.pin(job_id, pinned)
        self._show(job)
        return job

    async def delete(self, job_id: str) -> None:
        """Forget a job that is over; what it made stays. Raises `Refused` (not_found, conflict)."""
        job = await self.store.get(job_id)
        if not job.is_over:
            raise refuse(ErrorCode.CONFLICT, f"{job_id} is {job.state}; cancel it first")
        if job.pinned:
            raise refuse(ErrorCode.CONFLICT, f"{job_id} is pinned; take the pin away first")
        await forget(self.store, self.terms.folders, [job_id])
        self.told()

    async def _told(self, job_id: str, word: Event) -> Job:
        """An operator's word."""
        try:
            job = await self.apply(job_id, word)
        except IllegalTransition:
            job = await self.store.get(job_id)
            if word is Event.PAUSE and not kinds.kind_of(job.kind).resumable and not job.is_over:
                raise refuse(
                    ErrorCode.UNSUPPORTED, f"a job of kind {job.kind} cannot be paused; cancel it"
                ) from None
            raise refuse(ErrorCode.CONFLICT, f"{job_id} is {job.state}: there is nothing to {word}") from None
        if job.state is State.STOPPING:
            self._stop(job_id, saves=word is Event.PAUSE)
        elif job.state is not State.QUEUED:
            self._leave(job_id)
        self._wake.set()
        return job

    def _stop(self, job_id: str, *, saves: bool = False) -> None:
        if (run := self._running.get(job_id)) is not None:
            run.stop(saves=saves)

    # ------------------------------------------------------------ whose turn it is

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            try:
                delay = await self._admit_all()
            except Refused as refused:  # the disk is full, say: rows wait
                event(log, "job.not_admitted", level=logging.ERROR, error=str(refused))
                delay = ROW_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    async def _admit_all(self) -> float | None:
        """Begin what may begin. Seconds until the next look; None = nothing will change by time alone."""
        delay: float | None = None
        queued = [] if self.is_closing else await self.store.queued()
        for job in queued:
            if left := self.store.due_in(job):
                delay = left if delay is None else min(delay, left)
                continue
            if job.id in self._running:
                continue  # it has just been queued again, and its last process is not quite gone
            waits = self._hindrance(job)
            if waits != self._waits.get(job.id, ""):
                self._waits[job.id] = waits
                self._show(job)
            if not waits:
                with contextlib.suppress(IllegalTransition):  # it was cancelled meanwhile
                    await self._admit(job.id)
        for job_id in self._waits.keys() - {job.id for job in queued}:
            del self._waits[job_id]
        return delay

    def _hindrance(self, job: Job) -> str:
        """Why a job cannot begin now; "" = it can."""
        kind = kinds.kind_of(job.kind)
        others = [run for run in self._running.values() if run.uses_gpu is kind.uses_gpu]
        if not kind.uses_gpu:
            return f"{others[0].job.id}, which runs" if len(others) >= self._max_running else ""
        if others:
            return f"{others[0].job.id}, which runs"
        if self._places is None:
            return ""
        return self._places.ask(job.id, job.needs, may_leave=kind.resumable)

    async def _admit(self, job_id: str) -> Job | None:
        """Shielded: a row that is starting must get its run, whoever cancels the scheduler."""

        async def admit() -> Job:
            try:
                job = await self.store.admit(job_id, self._owner)
            except BaseException:
                self._leave(job_id)
                raise
            run = Run(self, job)
            run.hold(run.uses_gpu and self._turn.should_wait)
            self._begin(run)
            self._tell(job)
            return job

        self._admitting = asyncio.create_task(admit())
        return await asyncio.shield(self._admitting)

    def _begin(self, run: Run) -> None:
        self._running[run.job.id] = run
        run.ended = asyncio.create_task(run.run())

    def _leave(self, job_id: str) -> None:
        if self._places is not None:
            self._places.leave(job_id)

    def _displaced(self, job_id: str) -> None:
        """A model is starving for its memory: it stops, and goes on later."""

        async def displace() -> None:
            with contextlib.suppress(IllegalTransition, Refused):
                job = await self.apply(job_id, Event.YIELDED)
                event(log, "job.displaced", job=job_id, state=job.state)
                self._stop(job_id, saves=True)

        self._later(displace())

    # ------------------------------------------------------------ answers come first

    def answers(self, are_running: bool) -> None:
        """Whether requests are answered, or wait to be, just now."""
        if not self.is_closing:
            self._turn.answers(are_running)

    def _hold(self) -> None:
        held = self._turn.should_wait
        for run in self._running.values():
            if run.uses_gpu and run.is_held is not held:
                run.hold(held)
                event(log, "job.held" if held else "job.goes_on", job=run.job.id)
                self._later(self._tell_of(run.job.id))

    async def _tell_of(self, job_id: str) -> None:
        with contextlib.suppress(Refused):
            self._show(await self.store.get(job_id))

    # ------------------------------------------------------------ what a run needs

    @property
    def grace_s(self) -> float:
        return self._policy().grace_s if self.terms.runtime_dir is not None else 0.0

    async def apply(self, job_id: str, what: Event, *, transient: bool = False, **changes: Any) -> Job:
        job = await self.store.apply(job_id, what, transient=transient, **changes)
        self._tell(job)
        return job

    def told(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Set when the next time some job tells something, or moves. Ask for it before you look."""
        return self._news

    def measured(self, job_id: str, peak: int) -> None:
        if self._places is not None:
            self._places.measure(job_id, peak)

    def completed(self, spec: JobSpec) -> JobSpec:
        if getattr(spec, "url", None) == "" and self.url:
            return msgspec.structs.replace(spec, url=self.url)
        return spec

    def ended(self, run: Run) -> None:
        del self._running[run.job.id]
        self._leave(run.job.id)
        self._wake.set()

    def _show(self, job: Job) -> None:
        self._publish("job", self.view(job))
        self.told()

    def _tell(self, job: Job) -> None:
        """A job has moved: to everyone, and what follows on its end."""
        self._show(job)
        if job.state is State.DONE:
            self._on_done(job)
        elif job.state is State.CANCELLED and (spec := pulled(job)) is not None:
            self._later(asyncio.to_thread(forget_parts, Path(spec.cache_dir), spec.repo))

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            with contextlib.suppress(Refused):
                await self._clear_up()

    async def _clear_up(self) -> None:
        await clear_up(self.store, self.terms.folders, self.clock(), self._policy().retention)


def _interrupted(said: str) -> str:
    text = said if said.startswith("interrupted") else f"interrupted: {said}"
    return msgspec.json.encode(Failure(ErrorCode.ENGINE_UNAVAILABLE, text)).decode()
