"""One job between `admit` and `exit`: its process, and what that says, in order and once, into the store."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from parent.jobs import kinds, retry
from parent.jobs.evaluations import RESULT
from parent.jobs.quoting import shown
from parent.jobs.record import Folder, JobRecord, encoded
from parent.jobs.run import SILENCE_S, JobWorker, start
from parent.jobs.states import Event, IllegalTransition, State
from parent.jobs.store import Job, Jobs
from parent.keys import local_key
from parent.workers.process import started_at
from parent.workers.states import Limits
from shared import control
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.jobs import JobDone, JobEvent, JobLog, JobMetric, JobSaved, JobSpec, JobStage, JobStarted
from shared.logs import event
from shared.version import WIRE

log = logging.getLogger(__name__)
ROW_S = 1.0  # between two updates of a row's progress
BEAT_S = 10.0  # between two notes of when it was last heard
MOST_UNHEARD = 100  # updates that are written down before the worker is told so, while more come in


class Beat(NamedTuple):
    """The process was heard, and has held so much at most."""

    peak: int


class Terms(NamedTuple):
    """How processes are started and ended. `runtime_dir` None: nobody could adopt them. `folders`: of all jobs."""

    folders: Path
    runtime_dir: Path | None = None
    command: list[str] | None = None
    env: dict[str, str] | None = None
    limits: Limits = Limits()
    silence_s: float = SILENCE_S
    backoff: retry.Backoff = retry.Backoff()


class Keeper(Protocol):
    """What a run needs of the queue."""

    store: Jobs
    terms: Terms
    is_closing: bool
    clock: Callable[[], float]

    @property
    def grace_s(self) -> float:
        """How long a job's process works on without a server; 0 = not at all."""

    async def apply(self, job_id: str, what: Event, *, transient: bool = False, **changes: Any) -> Job:
        """An event of table J."""

    def told(self) -> None:
        """A job has told something."""

    def measured(self, job_id: str, peak: int) -> None:
        """What its process has held at most."""

    def completed(self, spec: JobSpec) -> JobSpec:
        """The spec with what only the running server knows."""

    def ended(self, run: "Run") -> None:
        """No process is left, or another server takes it over."""


class Run:
    """Start it with `run`, after `take` where there is a process already; `ended` is the task of that."""

    def __init__(self, keeper: Keeper, job: Job) -> None:
        self.keeper = keeper
        self.job = job
        self.ended: asyncio.Task[None]
        self.is_held = False
        self.folder = Folder(keeper.terms.folders, job.id)
        self._kind = kinds.kind_of(job.kind)
        self._heard = job.heard
        self._inbox: asyncio.Queue[tuple[int, JobEvent | Beat] | Failure | None] = asyncio.Queue()
        self._worker: JobWorker | None = None
        self._process: asyncio.Task[JobDone] | None = None
        self._stopped = self._let_go = False
        self._is_live = True
        self._stage, self._saved_step = job.stage, job.saved_step
        self._last: JobStage | None = None
        self._growth = retry.Growth(self._kind.grows)
        self._unheard = 0
        self._beaten_at = -BEAT_S

    @property
    def uses_gpu(self) -> bool:
        return self._kind.uses_gpu

    @property
    def socket(self) -> str:
        """Where a later parent finds its process; "" = nowhere."""
        return self._worker.adopt_path if self._worker else ""

    # ------------------------------------------------------------ what the queue tells it

    def stop(self, *, saves: bool = False) -> None:
        """Begin the stop ladder; the row says already what becomes of the job. `saves`: it may take the time that its
        kind needs for a last checkpoint.
        """
        self._stopped = True
        if self._worker is not None:
            limit_s = self.keeper.terms.limits.stop_grace_s
            self._worker.grace_s = max(limit_s, self._kind.save_s) if saves else limit_s
        if self._process is not None:
            self._process.cancel()

    def hold(self, held: bool) -> None:
        """Wait before the next step, or take it."""
        if held is not self.is_held:
            self.is_held = held
            if self._worker is not None:
                self._worker.hold(held)

    def let_go(self) -> None:
        """Leave the process to a later server, which adopts it."""
        self._let_go = True
        if self._worker is not None:
            self._worker.lives_on = True
        if self._process is not None:
            self._process.cancel()

    # ------------------------------------------------------------ its life

    def take(self, worker: JobWorker) -> None:
        """Its process, whether we have started or adopted it."""
        self._worker = worker
        worker.on_beat = self._beat
        worker.hold(self.is_held)

    async def run(self) -> None:
        """Returns when no process is left and the row says how it went, or once it was let go."""
        keeper, job, adopted = self.keeper, self.job, self._worker
        failure: Failure | None = None
        try:
            with contextlib.suppress(Refused):
                if (await keeper.store.get(job.id)).state is State.STOPPING:
                    self._stopped = True  # the word came between the row and this run
            if adopted is None:
                self._stage = ""  # a new attempt tells its stages from the first one on
            if adopted is not None or not (self._stopped or self._let_go):
                event(log, "job.started", job=job.id, kind=job.kind, attempt=job.attempt)
                self._process = asyncio.ensure_future(self._work(adopted))
                if self._stopped or self._let_go:
                    self._process.cancel()  # which is no start yet: a process that was adopted is ended below
                pump = asyncio.create_task(self._pump())
                await asyncio.wait({self._process})
                await self._see_it_gone()
                self._inbox.put_nowait(None)
                await pump
                failure = _failure_of(self._process)
            if not self._let_go:
                await self._exit(failure)
        finally:
            keeper.ended(self)

    async def _see_it_gone(self) -> None:
        worker = self._worker
        if worker is not None and not self._let_go and not worker.process.exited.done():
            await worker.end(self.keeper.terms.limits)

    async def recount(self, messages: Sequence[control.JobUpdate | control.Fatal]) -> None:
        """What the process told while nobody listened, now that it is dead: into the store, its end included.

        Raises `Refused` where that cannot be written.
        """
        failure: Failure | None = None
        is_done, self._is_live = False, False
        for message in messages:
            if isinstance(message, control.Fatal):
                failure = shown(message.failure)
                continue
            is_done = is_done or isinstance(message.event, JobDone)
            self._inbox.put_nowait((message.seq, message.event))
        self._inbox.put_nowait(None)
        await self._pump()
        if is_done or failure is not None:
            await self._exit(failure)

    async def _work(self, adopted: JobWorker | None) -> JobDone:
        terms = self.keeper.terms
        if adopted is not None:
            return await adopted.attend(None, terms.limits, terms.silence_s, self._inbox.put_nowait)
        try:
            spec = kinds.decode_spec(self.job.spec)
        except msgspec.MsgspecError as error:
            said = f"this version of mlxd cannot run {self.job.id} of kind {self.job.kind}: {error}"
            raise refuse(ErrorCode.UNSUPPORTED, said) from None
        launch, adopt_path = self._launch(self.keeper.completed(spec))
        worker = await start(
            launch,
            self.update,
            worker_command=terms.command,
            worker_env=self._environment(launch.spec),
            adopt_path=adopt_path,
        )
        self.take(worker)
        note = self._note(launch, worker)
        return await worker.attend(launch, terms.limits, terms.silence_s, self._inbox.put_nowait, note)

    def _environment(self, spec: JobSpec) -> dict[str, str]:
        """With the key of this server for a job that asks it as clients do."""
        env = {**(self.keeper.terms.env or {}), "TMPDIR": str(self.folder.scratch)}
        if getattr(spec, "url", "") and (key := local_key(self.keeper.terms.folders.parent)):
            env["LOCAL_API_KEY"] = key
        return env

    def _launch(self, spec: JobSpec) -> tuple[control.LaunchJob, Path | None]:
        """Raises `Refused` where its folder cannot be made."""
        job, terms = self.job, self.keeper.terms
        try:
            self.folder.make(job.attempt)
        except OSError as error:
            code = ErrorCode.DISK_FULL if error.errno in (28, 122) else ErrorCode.FORBIDDEN
            said = f"the job's folder {self.folder.path} cannot be made: {error.strerror or error}"
            raise refuse(code, said) from None
        can_live_on = terms.runtime_dir is not None and self.keeper.grace_s > 0
        launch = control.LaunchJob(
            job_id=job.id,
            spec=spec,
            output=job.output,
            work=str(self.folder.path),
            resume=job.resume,
            spool=str(self.folder.spool(job.attempt)),
            nonce=secrets.token_hex(16) if can_live_on else "",
            grace_s=self.keeper.grace_s if can_live_on else 0.0,
        )
        if not can_live_on or terms.runtime_dir is None:
            return launch, None
        return launch, terms.runtime_dir / f"j{secrets.token_hex(4)}.ctl"

    def _note(self, launch: control.LaunchJob, worker: JobWorker) -> Callable[[], Awaitable[None]]:
        """What has to be in the row before the process is told what to do: a later server must find it, or know that
        it has done nothing.
        """

        async def note() -> None:
            record = JobRecord(
                pid=worker.process.pid,
                start_time=started_at(worker.process.pid),
                adopt_socket=worker.adopt_path,
                nonce=launch.nonce,
                wire=WIRE,
            )
            await self.keeper.store.set(self.job.id, worker=encoded(record))

        return note

    # ------------------------------------------------------------ what the process says

    def update(self, seq: int, event: JobEvent) -> None:
        """Its process tells something."""
        self._inbox.put_nowait((seq, event))

    def _beat(self) -> None:
        """Its process lives: what it has held, and now and then when it was heard."""
        now = asyncio.get_running_loop().time()
        if self._worker is None:
            return
        self.keeper.measured(self.job.id, self._worker.peak_bytes)
        if now >= self._beaten_at + BEAT_S:
            self._beaten_at = now
            self._inbox.put_nowait((0, Beat(self._worker.peak_bytes)))

    async def _pump(self) -> None:
        """What the worker says, into the store. Nothing it says can end the job but by table J."""
        latest: JobStage | None = None
        loop = asyncio.get_running_loop()
        written_at = -ROW_S
        while True:
            news: tuple[int, JobEvent | Beat] | Failure | None = None
            try:
                async with asyncio.timeout_at(written_at + ROW_S if latest else None):
                    news = await self._inbox.get()
            except TimeoutError:
                await self._progress(latest)
                latest, written_at = None, loop.time()
                continue
            seq, said = news if isinstance(news, tuple) else (0, news)
            if seq and not self._is_next(seq):
                continue
            if isinstance(said, Beat):
                with contextlib.suppress(Refused):
                    beat = {"heartbeat_at": self.keeper.clock(), "peak_bytes": said.peak}
                    await self.keeper.store.set(self.job.id, **beat)
                continue
            if isinstance(said, JobStage):
                self._growth.see(said)
                self._last = said
                if said.stage != self._stage:
                    await self._progress(latest)
                    await self._record(seq, "stage", {"stage": said.stage, "total": said.total})
                    self._stage, written_at = said.stage, -ROW_S
                elif seq:
                    self._heard = seq
                latest = said
                if loop.time() >= written_at + ROW_S:
                    await self._progress(latest)
                    latest, written_at = None, loop.time()
                continue
            await self._progress(latest)
            latest = None
            if said is None:
                return
            if isinstance(said, Failure):
                transient, changes = self._judge(said)
                await self._write(0, Event.DEADLINE, transient=transient, **changes)
            else:
                await self._hear(seq, said)

    def _is_next(self, seq: int) -> bool:
        """What is written down is not taken again; what came too early comes once more, in its turn. A dead process
        says nothing once more.
        """
        return seq == self._heard + 1 or (not self._is_live and seq > self._heard)

    async def _hear(self, seq: int, said: JobEvent) -> None:
        match said:
            case JobStarted():
                await self._write(seq, Event.STARTED)
            case JobLog(line=line):
                await self._record(seq, "log", {"line": line})
            case JobMetric():
                if self._worker is not None:
                    self._worker.peak_bytes = max(self._worker.peak_bytes, said.peak_bytes or 0)
                body = msgspec.to_builtins(said)
                del body["type"]
                await self._record(seq, "metric", body)
            case JobSaved(resume=resume, step=step):
                if step > self._saved_step:  # whoever dies now was not killed by this job
                    self._growth.grew, self._saved_step = True, step
                saved = {"resume": resume, "saved_step": step, "orphaned": 0, "fruitless": 0}
                await self._record(seq, "saved", {"resume": resume, "step": step}, **saved)
            case JobDone(output=output, summary=summary, result=result):
                if result:  # before the row says so: who sees it done finds it
                    await self._record(0, RESULT, result)
                await self._write(seq, Event.DONE, output=output or self.job.output, message=summary)

    async def _progress(self, latest: JobStage | None) -> None:
        if latest is None:
            return
        counts: dict[str, Any] = {"stage": latest.stage, "done": latest.done, "total": latest.total}
        if self._growth.grew:
            counts["orphaned"] = 0  # a server that dies now was not killed by this job
        await self._write(0, Event.PROGRESS, message=latest.message, **counts)

    async def _record(self, seq: int, kind: str, data: dict[str, Any], **changes: Any) -> None:
        """Into its log, and with it the number of the update."""
        if seq:
            changes["heard"] = seq
        await self._surely(seq, lambda: self.keeper.store.note(self.job.id, kind, data, **changes))
        self.keeper.told()

    async def _write(self, seq: int, what: Event, *, transient: bool = False, **changes: Any) -> None:
        if seq:
            changes["heard"] = seq

        async def apply() -> None:
            try:
                await self.keeper.apply(self.job.id, what, transient=transient, **changes)
            except IllegalTransition as error:  # a worker that says things out of order
                event(log, "job.out_of_order", level=logging.WARNING, job=self.job.id, error=str(error))
                if seq:
                    await self.keeper.store.set(self.job.id, heard=seq)

        await self._surely(seq, apply)

    async def _surely(self, seq: int, write: Callable[[], Awaitable[None]]) -> None:
        """A numbered update waits for the disk to have room; the worker keeps it until it hears that it is there."""
        while True:
            try:
                await write()
                break
            except Refused as refused:
                event(log, "job.not_written", level=logging.ERROR, job=self.job.id, error=str(refused))
                if not self._is_live:
                    raise
                if not seq or self.keeper.is_closing:
                    return
                await asyncio.sleep(ROW_S)
        if not seq:
            return
        self._heard = seq
        self._unheard += 1
        if self._worker is not None and (self._inbox.empty() or self._unheard >= MOST_UNHEARD):
            self._worker.say(control.Heard(seq))
            self._unheard = 0

    # ------------------------------------------------------------ its end

    async def _exit(self, failure: Failure | None) -> None:
        """The last event, which must reach the row: while the disk is full it is tried again."""
        keeper, job_id = self.keeper, self.job.id
        transient, changes = self._judge(failure) if failure else (False, {})
        if self._worker is not None and self._worker.peak_bytes:
            changes["peak_bytes"] = self._worker.peak_bytes
        while True:
            try:
                ended = await keeper.apply(job_id, Event.EXIT, transient=transient, **changes)
                break
            except Refused as refused:
                event(log, "job.not_written", level=logging.ERROR, job=job_id, error=str(refused))
                if keeper.is_closing:
                    return  # the next start finds the row, and that its owner is gone
                await asyncio.sleep(ROW_S)
        event(log, "job.left", job=job_id, state=ended.state, error=ended.error)
        keep = ended.state not in (State.DONE, State.CANCELLED)
        await asyncio.to_thread(self.folder.tidy, keep=keep)

    def _judge(self, failure: Failure) -> tuple[bool, dict[str, Any]]:
        """Whether the job shall be tried again, and what its row then says."""
        if failure.code is ErrorCode.CANNOT_FIT and (last := self._last):
            count = f", {last.done} of {last.total}" if last.total else ""
            failure = msgspec.structs.replace(
                failure, message=f"{failure.message} (stage {last.stage}{count})"
            )
        changes: dict[str, Any] = {"error": msgspec.json.encode(failure).decode()}
        if not self._kind.resumable:
            return False, changes
        terms = self.keeper.terms
        again = retry.after(failure, self.job.fruitless, grew=self._growth.grew, backoff=terms.backoff)
        changes["fruitless"] = again.fruitless
        if again.delay_s is not None:
            changes["retry_at"] = self.keeper.clock() + again.delay_s
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
