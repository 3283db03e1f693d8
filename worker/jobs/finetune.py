"""Train an adapter: look through the data, load the model, take the steps, publish the adapter.

Stages: inspect, tokenize, load, train. A run that was stopped or killed goes on from its last checkpoint and ends with
the same adapter, to the bit.
"""

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from shared.dataset import DataSet, read
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobLog, JobMetric, JobSaved, JobStage
from shared.lab import Finetune
from shared.units import format_bytes
from worker.datasets.examples import Facts, Writer, check_method, write_all
from worker.jobs import finetune_saves as saves
from worker.jobs.context import JobContext, make_scratch, publish
from worker.models import LoadedModel, load_model
from worker.train.adapter import Adapter, attach, count_values
from worker.train.files import CONFIG, warm_start, write_adapter
from worker.train.gradients import graph_of
from worker.train.optimizer import learning_rate
from worker.train.trainer import Measured, Rows, Trainer

METRICS = "metrics.jsonl"
_NO_ROOM = re.compile(r"alloc|out of memory", re.IGNORECASE)


def run(spec: Finetune, ctx: JobContext) -> JobDone:
    """Raises `Refused`: invalid_request, bad_checkpoint, unsupported, conflict, cannot_fit (out of memory), disk_full,
    shutting_down (it was stopped)."""
    if ctx.output is None:
        raise refuse(ErrorCode.INVALID_REQUEST, "the job has no output")
    if (done := _published(ctx)) is not None:
        return done
    if spec.warmup_iters >= spec.iters:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"warmup_iters is {spec.warmup_iters}, and there are {spec.iters} iters; choose fewer",
            param="warmup_iters",
        )
    ctx.emit(JobStage("inspect", message=spec.data))
    data = read(spec.data, split=spec.steps_per_eval > 0 and not spec.like_mlx_lm)
    check_method(data, spec.method)
    train, valid = _tokenized(spec, data, ctx)
    loaded = load_model(Path(spec.model), on_progress=lambda done, total: _loading(ctx, done, total))
    adapter = attach(loaded, spec)
    scratch = make_scratch(ctx.output)
    try:
        return _Run(spec, ctx, loaded, adapter, train, valid, scratch).to_its_end()
    finally:
        adapter.remove()
        shutil.rmtree(scratch, ignore_errors=True)


class _Run:
    """One run: the trainer, what is told, and the folders."""

    def __init__(
        self,
        spec: Finetune,
        ctx: JobContext,
        loaded: LoadedModel,
        adapter: Adapter,
        train: Rows,
        valid: Rows,
        scratch: Path,
    ) -> None:
        assert ctx.output is not None
        self.spec, self.ctx, self.adapter, self.output = spec, ctx, adapter, ctx.output
        self.scratch, self.work = scratch, ctx.work or scratch
        self.work.mkdir(parents=True, exist_ok=True)
        arrays = adapter.initial()
        if spec.warm_start_adapter:
            arrays = warm_start(Path(spec.warm_start_adapter), adapter, arrays)
        graph = graph_of(loaded, adapter)
        self.depth = len(graph.model.layers)
        self.trainer = Trainer(graph, spec, train, valid, arrays)
        self.digest = _digest(spec, loaded)
        self.losses: list[float] = []
        self.told_at, self.told_step, self.told_tokens = time.monotonic(), 0, 0
        self._log(
            f"{count_values(arrays):,} values in {len(adapter.sites)} projections, "
            f"{self.trainer.groups} batches of {spec.batch_size}"
        )

    def to_its_end(self) -> JobDone:
        """Go on from the checkpoint if there is one, train, publish."""
        self._go_on()
        mx.reset_peak_memory()
        spec, trainer = self.spec, self.trainer
        self._restart_clock()
        try:
            while True:
                self._check()
                if self._evaluates():
                    self._evaluate()
                if trainer.step == spec.iters:
                    break
                measured = trainer.take_step()
                self._after(measured)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or _NO_ROOM.search(str(error)):
                raise self._no_room(error) from None
            raise
        except OSError as error:
            raise _disk(error, self.work) from None
        try:
            return self._publish()
        except OSError as error:
            raise _disk(error, self.output) from None

    # ------------------------------------------------------------ steps

    def _after(self, measured: Measured) -> None:
        spec, trainer = self.spec, self.trainer
        self.losses.append(measured.loss)
        step = trainer.step
        self.ctx.emit(JobStage("train", step, spec.iters, f"loss {measured.loss:.4f}"))
        if step % spec.steps_per_report == 0 or step == spec.iters:
            spent = max(time.monotonic() - self.told_at, 1e-9)
            self._tell(
                JobMetric(
                    "train",
                    step,
                    sum(self.losses) / len(self.losses),
                    learning_rate=learning_rate(spec, step),
                    tokens_per_s=(trainer.tokens - self.told_tokens) / spent,
                    steps_per_s=(step - self.told_step) / spent,
                    grad_norm=measured.norm,
                    accuracy=measured.accuracy,
                    margin=measured.margin,
                    peak_bytes=mx.get_peak_memory(),
                    tokens=trainer.tokens,
                )
            )
            self.losses = []
            self._restart_clock()
        if mx.get_cache_memory() > mx.get_peak_memory() // 4:  # memory that serving may want
            mx.clear_cache()
        if spec.steps_per_save and step % spec.steps_per_save == 0 and step < spec.iters:
            self._save()

    def _evaluates(self) -> bool:
        """Before the first step, every so many, and after the last; mlx-lm does so one step earlier."""
        spec, step = self.spec, self.trainer.step
        if not spec.steps_per_eval or not self.trainer.can_evaluate:
            return False
        if spec.like_mlx_lm:
            return step < spec.iters and (
                step == 0 or (step + 1) % spec.steps_per_eval == 0 or step + 1 == spec.iters
            )
        return step % spec.steps_per_eval == 0 or step == spec.iters

    def _evaluate(self) -> None:
        began, step = time.monotonic(), self.trainer.step
        found = self.trainer.evaluate(self._check)
        self._tell(
            JobMetric(
                "val",
                step,
                found.loss,
                accuracy=found.accuracy,
                margin=found.margin,
                tokens=found.tokens,
            )
        )
        if self.spec.save_checkpoints and step:
            self._write(self.work / "kept" / f"step-{step}")
        self.told_at += time.monotonic() - began

    def _check(self) -> None:
        """Where the run may be stopped: what is done by now is saved first."""
        if not self.ctx.should_stop():
            return
        if self.ctx.work is None:
            self.ctx.check()
        self._save()
        raise refuse(
            ErrorCode.SHUTTING_DOWN,
            f"the training was stopped after step {self.trainer.step}, from where it can go on",
        )

    # ------------------------------------------------------------ files

    def _go_on(self) -> None:
        values = None
        if self.ctx.work is not None:
            values = saves.go_on(self.work, self.ctx.resume, self.digest, self.trainer.restore, self._log)
        metrics = self.work / METRICS
        kept = self.work / "kept"
        if values is None:
            metrics.write_bytes(b"")
            shutil.rmtree(kept, ignore_errors=True)
            return
        self.losses = [float(loss) for loss in values["losses"]]
        with metrics.open("ab") as file:  # what came after the checkpoint comes again
            file.truncate(int(values["metrics_bytes"]))
        self._log(f"goes on after step {self.trainer.step}")

    def _save(self) -> None:
        """A checkpoint, where there is a folder for it."""
        if self.ctx.work is None:
            return
        arrays, values = self.trainer.snapshot()
        values |= {
            "digest": self.digest,
            "losses": self.losses,
            "metrics_bytes": (self.work / METRICS).stat().st_size,
        }
        began = time.monotonic()
        name = saves.save(self.work, self.trainer.step, arrays, values)
        self.told_at += time.monotonic() - began
        self.ctx.emit(JobSaved(name, self.trainer.step))

    def _write(self, folder: Path, **more: Any) -> None:
        write_adapter(folder, self.adapter, self.trainer.arrays, self.spec, self.depth, **more)

    def _publish(self) -> JobDone:
        job = {"job": self.ctx.work.name} if self.ctx.work is not None else {}
        self._write(self.scratch, **job)
        if self.work != self.scratch:
            shutil.copyfile(self.work / METRICS, self.scratch / METRICS)
        if (kept := self.work / "kept").is_dir():
            shutil.copytree(kept, self.scratch / "checkpoints")
            if self.work == self.scratch:
                shutil.rmtree(kept)
        if self.output.exists():
            raise _taken(self.output)
        publish(self.scratch, self.output)
        return JobDone(str(self.output), _summary(self.output))

    # ------------------------------------------------------------ telling

    def _tell(self, metric: JobMetric) -> None:
        with (self.work / METRICS).open("ab") as file:
            file.write(msgspec.json.encode(metric) + b"\n")
        self.ctx.emit(metric)

    def _log(self, line: str) -> None:
        self.ctx.emit(JobLog(line))

    def _restart_clock(self) -> None:
        self.told_at, self.told_step = time.monotonic(), self.trainer.step
        self.told_tokens = self.trainer.tokens

    def _no_room(self, error: Exception) -> Refused:
        spec = self.spec
        ways = [
            *(["a smaller batch_size"] if spec.batch_size > 1 else []),
            "a smaller max_seq_length",
            *([] if spec.grad_checkpoint else ["grad_checkpoint"]),
            *([] if spec.segment_size else ["segment_size 4"]),
            *([] if spec.head_chunk else ["head_chunk 256"]),
        ]
        peak = format_bytes(mx.get_peak_memory())
        return refuse(
            ErrorCode.CANNOT_FIT,
            f"out of memory after step {self.trainer.step}, at {peak} ({' '.join(str(error).split())[:200]}); "
            f"try {', '.join(ways)}",
        )


def _tokenized(spec: Finetune, data: DataSet, ctx: JobContext) -> tuple[Rows, Rows]:
    """Of both parts. Raises `Refused` where nothing is left to learn."""
    writer, total = Writer(Path(spec.model)), len(data.train) + len(data.valid)

    def part(rows: list[Any], before: int) -> tuple[Rows, Facts]:
        def on_row(number: int) -> None:
            ctx.check()
            if number % 64 == 0 or number == len(rows):
                ctx.emit(JobStage("tokenize", before + number, total))

        return write_all(writer, rows, spec.sft_scope, spec.max_seq_length, on_row)

    train, facts = part(data.train, 0)
    valid, held = part(data.valid, len(data.train))
    for name, found in (("train", facts), ("valid", held)):
        if found.rows or found.dropped:
            ctx.emit(JobLog(f"{name}: {_told(found, spec)}"))
    if data.held_out:
        ctx.emit(JobLog(f"no valid.jsonl: the last {data.held_out} rows of train.jsonl are held out"))
    if not train:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"{spec.data}: no row has a token to learn within max_seq_length {spec.max_seq_length}; raise it",
            param="max_seq_length",
        )
    return train, valid


def _told(facts: Facts, spec: Finetune) -> str:
    text = f"{facts.rows} rows, {facts.tokens:,} tokens, median {facts.median}, longest {facts.longest}"
    if facts.cut:
        text += f"; {facts.cut} cut at max_seq_length {spec.max_seq_length}"
    if facts.dropped:
        lines = ", ".join(facts.dropped[:10]) + (", …" if len(facts.dropped) > 10 else "")
        text += f"; {len(facts.dropped)} left out, with nothing to learn in them ({lines})"
    return text


def _loading(ctx: JobContext, done: int, total: int) -> None:
    ctx.check()
    ctx.emit(JobStage("load", done, total))


def _published(ctx: JobContext) -> JobDone | None:
    """What an earlier start of this very job has published. Raises `Refused` (conflict) where something else is."""
    assert ctx.output is not None
    if not ctx.output.exists():
        return None
    try:
        job = json.loads((ctx.output / CONFIG).read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):
        job = None
    if ctx.work is not None and job == ctx.work.name:
        return JobDone(str(ctx.output), _summary(ctx.output))
    raise _taken(ctx.output)


def _summary(output: Path) -> str:
    """The last losses, read from what was told."""
    last: dict[str, JobMetric] = {}
    for line in (output / METRICS).read_bytes().splitlines():
        metric = msgspec.json.decode(line, type=JobMetric)
        last[metric.kind] = metric
    parts = [
        f"{words} {last[kind].loss:.4f}"
        for kind, words in (("train", "loss"), ("val", "held-out loss"))
        if kind in last
    ]
    return f"{last['train'].step} steps, {', '.join(parts)}"


def _taken(output: Path) -> Refused:
    return refuse(ErrorCode.CONFLICT, f"{output} exists; choose another name, or remove it")


def _disk(error: OSError, folder: Path) -> Refused:
    code = ErrorCode.DISK_FULL if error.errno in (28, 122) else ErrorCode.CONFLICT
    return refuse(code, f"{folder}: cannot be written ({error.strerror or error})")


def _digest(spec: Finetune, loaded: LoadedModel) -> str:
    """Of what the steps depend on: settings, data, and the model as far as its files' sizes tell."""
    digest = hashlib.sha256(msgspec.json.encode(spec))
    for name in ("train", "valid"):
        file = Path(spec.data) / f"{name}.jsonl"
        digest.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
    digest.update(json.dumps(loaded.checkpoint.config, sort_keys=True, default=str).encode())
    digest.update(str(loaded.checkpoint.weights_bytes).encode())
    return digest.hexdigest()
