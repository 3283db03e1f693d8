"""Build a data set by a template: plan its units, work them off, check, split, publish.

Stages: plan, make, write. A run that was stopped or killed goes on with the units that are missing; the same answers of
the server give the same files.
"""

import asyncio
import hashlib
import shutil
from pathlib import Path

import msgspec

from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobLog, JobSaved, JobStage
from shared.lab import Dataset
from shared.lab_templates import checked_inputs, template_of
from worker.jobs.context import JobContext, make_scratch, publish
from worker.lab.dataset import maker_of
from worker.lab.dataset.asking import Server
from worker.lab.dataset.finishing import REPORT, Report, finish, write
from worker.lab.dataset.form import Kit, Made, Plan
from worker.lab.dataset.journal import NAME, Journal
from worker.lab.dataset.viewer import Viewer
from worker.lab.dataset.working import work_off

PREVIEWS = 3
SHOWN_CHARS = 2000
SAVE_EVERY = 16  # units


def run(spec: Dataset, ctx: JobContext) -> JobDone:
    """Raises `Refused`: invalid_request (template, inputs, no row came of it), conflict (the output exists),
    unsupported (no sandbox here), engine_unavailable and hub (later, perhaps), disk_full, shutting_down."""
    if ctx.output is None:
        raise refuse(ErrorCode.INVALID_REQUEST, "the job has no output")
    template = template_of(spec.template)
    inputs = checked_inputs(spec.template, spec.inputs)
    if template.needs_llm and not spec.url:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"template {template.id} asks a model: name the url of a server that answers",
            param="url",
        )
    if (done := _published(ctx)) is not None:
        return done
    try:
        scratch = make_scratch(ctx.output)
    except OSError as error:
        raise _disk(error, ctx.output) from None
    try:
        return asyncio.run(_build(spec, ctx, inputs, scratch))
    except OSError as error:
        raise _disk(error, scratch) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _build(spec: Dataset, ctx: JobContext, inputs: dict[str, object], scratch: Path) -> JobDone:
    server = Server(spec.url, spec.model, temperature=spec.temperature, max_tokens=spec.max_tokens)
    viewer = Viewer()
    kit = Kit(inputs, spec.seed, server.ask, viewer.fetch)
    maker = maker_of(spec.template)
    try:
        ctx.emit(JobStage("plan", message=spec.template))
        plan = await maker.plan(kit)
        work = ctx.work or scratch / ".work"
        journal = Journal(work, _digest(spec, plan))
        if journal.started_over:
            ctx.emit(
                JobLog("inputs or settings are others than those of the rows that are there: begun anew")
            )
        elif journal.done:
            ctx.emit(JobLog(f"goes on: {len(journal.done)} of {len(plan.units)} units are there"))
        try:
            telling = _Telling(ctx, len(plan.units), len(journal.done))
            await work_off(
                plan, maker.make, kit, journal, streams=spec.streams, on_made=telling.made, check=ctx.check
            )
        finally:
            journal.close()
            ctx.emit(JobSaved(NAME, len(journal.done)))
    finally:
        await server.close()
        await viewer.close()
    shutil.rmtree(scratch / ".work", ignore_errors=True)
    return _finished(spec, ctx, inputs, plan, journal.done, scratch)


class _Telling:
    """Progress, and the first rows as they come."""

    def __init__(self, ctx: JobContext, total: int, done: int) -> None:
        self._ctx, self._total, self._done, self._shown = ctx, total, done, 0
        ctx.emit(JobStage("make", done, total))

    def made(self, number: int, made: Made) -> None:
        self._done += 1
        self._ctx.emit(JobStage("make", self._done, self._total))
        if self._done % SAVE_EVERY == 0:
            self._ctx.emit(JobSaved(NAME, self._done))
        for row in made.rows:
            if self._shown == PREVIEWS:
                return
            self._shown += 1
            shown = msgspec.json.encode(row).decode()
            self._ctx.emit(JobLog(f"row: {shown[:SHOWN_CHARS]}{'…' if len(shown) > SHOWN_CHARS else ''}"))


def _finished(
    spec: Dataset,
    ctx: JobContext,
    inputs: dict[str, object],
    plan: Plan,
    done: dict[int, Made],
    scratch: Path,
) -> JobDone:
    assert ctx.output is not None
    ctx.emit(JobStage("write"))
    result = finish(
        plan,
        done,
        deduplicate=spec.deduplicate,
        template=spec.template,
        inputs=inputs,
        model=spec.model,
        seed=spec.seed,
        job=ctx.work.name if ctx.work is not None else "",
    )
    for one in result.report.reasons[:PREVIEWS]:
        ctx.emit(JobLog(f"left out, {one.count} times: {one.reason} ({', '.join(one.where)})"))
    write(result, scratch)
    if ctx.output.exists():
        raise _taken(ctx.output)
    publish(scratch, ctx.output)
    return JobDone(str(ctx.output), _summary(result.report))


def _summary(report: Report) -> str:
    doubles = report.duplicates_exact + report.duplicates_near
    text = f"{report.rows} rows, {report.train} to train on and {report.valid} held out"
    text += f"; {report.dropped} left out" if report.dropped else ""
    return text + (f"; {doubles} doubles" if doubles else "")


def _digest(spec: Dataset, plan: Plan) -> str:
    """Of what the rows depend on; more streams change nothing."""
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(spec, streams=1, url="")))
    digest.update(msgspec.json.encode([plan.units, plan.limit]))
    return digest.hexdigest()


def _published(ctx: JobContext) -> JobDone | None:
    """What an earlier start of this very job has published. Raises `Refused` (conflict) where something else is."""
    assert ctx.output is not None
    if not ctx.output.exists():
        return None
    try:
        report = msgspec.json.decode((ctx.output / REPORT).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError):
        report = None
    if report is not None and ctx.work is not None and report.job == ctx.work.name:
        return JobDone(str(ctx.output), _summary(report))
    raise _taken(ctx.output)


def _taken(output: Path) -> Refused:
    return refuse(ErrorCode.CONFLICT, f"{output} exists; choose another name, or remove it")


def _disk(error: OSError, folder: Path) -> Refused:
    code = ErrorCode.DISK_FULL if error.errno in (28, 122) else ErrorCode.CONFLICT
    return refuse(code, f"{error.filename or folder}: cannot be written ({error.strerror or error})")
