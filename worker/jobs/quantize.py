"""Quantize a model: find out what matters where that is asked for, write the weights, measure, publish.

Stages: inspect, load and sensitivity (with `target_bpw`), quantize, measure. What is found and written stays in the
job's own folder, and a job that was stopped or killed goes on from there; the result is the same, to the byte.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import msgspec

from shared.checkpoint import INDEX
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobLog, JobSaved, JobStage
from shared.lab import Quantize
from shared.units import format_bytes
from shared.version import VERSION as mlxd_version
from worker.jobs.context import JobContext, make_scratch, publish, require_space
from worker.jobs.quantize_shards import SHARD_BYTES, Shard, plan, weight_map, write_all
from worker.layers.linear import Scheme
from worker.measure.compare import Measured, measure
from worker.measure.texts import Own, pieces
from worker.quantize import card
from worker.quantize.allocate import Choice, OutOfReach, allocate
from worker.quantize.layout import Source, bad_source, open_source
from worker.quantize.recipe import Matrix, Recipe, general_scheme, matrices, mixed, size_of, uniform
from worker.quantize.rotate import rotate
from worker.quantize.sensitivity import Progress, Table, measure_all

VERSION = 1
STATE, FOUND, SHARDS = "quantize.json", "sensitivity.jsonl", "shards"
HELD_OUT_PIECES, HELD_OUT_TOKENS = 16, 256
_NO_ROOM, _READING = re.compile(r"alloc|out of memory", re.IGNORECASE), re.compile(r"\[(load|read)")
_PROTECTED = (".shared_experts.", ".shared_expert.")


def run(spec: Quantize, ctx: JobContext, shard_bytes: int = SHARD_BYTES) -> JobDone:
    """Raises `Refused`: invalid_request, bad_checkpoint, unsupported, conflict, cannot_fit, disk_full, and
    shutting_down where it was stopped.

    `shard_bytes`: of one file of weights, at most.
    """
    if ctx.output is None:
        raise refuse(ErrorCode.INVALID_REQUEST, "the job has no output")
    if (done := _published(ctx)) is not None:
        return done
    ctx.emit(JobStage("inspect", message=spec.model))
    general = general_scheme(spec)
    scratch = None
    try:
        ctx.output.parent.mkdir(parents=True, exist_ok=True)
        scratch = make_scratch(ctx.output)
        return _Run(spec, ctx, general, scratch).to_its_end(shard_bytes)
    except OSError as error:
        code = ErrorCode.DISK_FULL if error.errno in (28, 122) else ErrorCode.CONFLICT
        where = error.filename or ctx.output
        raise refuse(code, f"{where}: cannot be read or written ({error.strerror or error})") from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or _NO_ROOM.search(str(error)):
            raise _no_room(spec, error) from None
        if _READING.search(str(error)):
            raise bad_source(spec.model, error) from None
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


class _Run:
    """One run: what is asked for, and its folders."""

    def __init__(self, spec: Quantize, ctx: JobContext, general: Scheme, scratch: Path) -> None:
        assert ctx.output is not None
        self.spec, self.ctx, self.general = spec, ctx, general
        self.output, self.scratch = ctx.output, scratch
        self.work = ctx.work or scratch / ".work"
        self.shards = self.work / SHARDS
        self.path = Path(spec.model)

    def to_its_end(self, shard_bytes: int) -> JobDone:
        """Everything that is not done yet."""
        spec, ctx = self.spec, self.ctx
        source = self._open()
        recipe = uniform(source, self.general)
        budget = self._budget(source, recipe)
        held_out = self._texts("held_out", HELD_OUT_PIECES, HELD_OUT_TOKENS) if spec.measure else []
        self._begin(source)
        if budget is not None:
            found = self._sensitivity(recipe)
            recipe = mixed(recipe, self._allocate(recipe, found, budget))
            self._keep_sensitivity(found, recipe)
        size = size_of(source, recipe.schemes)
        shards = plan(source, recipe.schemes, shard_bytes)
        skipped = [one.module for one in matrices(source) if one.module not in recipe.schemes]
        told = card.rows_of(spec, source, recipe, size, skipped)
        for what, value in told:
            ctx.emit(JobLog(f"{what}: {value}"))
        self._write(shards)
        card.copy_rest(self.path, self.scratch)
        card.write_config(source, recipe, self.scratch)
        card.write_index(weight_map(shards), size, self.scratch)
        self._place(shards)
        summary = f"{size.bits_per_weight:.3f} bits a weight"
        if spec.measure:
            measured = self._measure(held_out)
            told += card.measured_rows(measured)
            summary += _short(measured)
        card.write_card(spec, self.output.name, told, self.scratch, ctx.work.name if ctx.work else "")
        ctx.check()
        if self.output.exists():
            raise _taken(self.output)
        if self.work.is_relative_to(self.scratch):
            shutil.rmtree(self.work)
        publish(self.scratch, self.output)
        return JobDone(str(self.output), summary)

    # ------------------------------------------------------------ before

    def _open(self) -> Source:
        source = open_source(self.path)
        if self.spec.rotate:
            rotate(source, self.spec.rotation_seed)
        source.cast()
        return source

    def _budget(self, source: Source, recipe: Recipe) -> float | None:
        """Bytes for the open matrices, None = no mix is asked for. Refuses what cannot be reached, and a full disk."""
        spec = self.spec
        size = size_of(source, recipe.schemes)
        num_bytes, budget = size.num_bytes, None
        if spec.target_bpw is not None:
            num_bytes = int(spec.target_bpw * size.params / 8)
            budget = num_bytes - (size.num_bytes - sum(one.bytes_as(self.general) for one in recipe.open))
            group = self.general.group_size
            candidates = [Scheme("affine", bits, group) for bits in sorted(set(spec.candidate_bits))]
            if len(candidates) < 2:
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"candidate_bits are {card.candidates_of(spec)}; a mix needs two or more",
                    param="candidate_bits",
                )
            ends = [sum(one.bytes_as(scheme) for one in recipe.open) for scheme in candidates]
            if not ends[0] <= budget <= ends[-1]:
                rest = num_bytes - budget
                least, most = ((rest + end) * 8 / size.params for end in (ends[0], ends[-1]))
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"target_bpw {spec.target_bpw:g} is out of reach: with candidate_bits {card.candidates_of(spec)} "
                    f"in groups of {group} this model comes to {least:.3f} to {most:.3f} bits a weight",
                    param="target_bpw",
                )
        room = num_bytes - sum(file.stat().st_size for file in self.shards.glob("*.safetensors"))
        require_space(self.output.parent, max(0, room) + (16 << 20))
        return budget

    def _texts(self, own: Own, count: int, length: int) -> list[list[int]]:
        file = self.spec.calibration if own == "calibration" else ""
        return pieces(self.path, file, own, count, length, param="calibration")

    def _begin(self, source: Source) -> None:
        """Clear the job's folder, unless what is in it is of this very job and model."""
        self.work.mkdir(parents=True, exist_ok=True)
        digest = _digest(self.spec, source)
        state = self.work / STATE
        try:
            known = json.loads(state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if known != {"digest": digest}:
            if known is not None:
                self.ctx.emit(
                    JobLog("begins anew: settings, model or version are not those of what was done before")
                )
            shutil.rmtree(self.shards, ignore_errors=True)
            (self.work / FOUND).unlink(missing_ok=True)
            state.write_text(json.dumps({"digest": digest}), encoding="utf-8")
        self.shards.mkdir(exist_ok=True)
        for left in self.shards.glob("*.part"):
            left.unlink()

    # ------------------------------------------------------------ a mix

    def _sensitivity(self, recipe: Recipe) -> Table:
        spec, ctx = self.spec, self.ctx
        rows = self._texts("calibration", spec.num_calibration, spec.calibration_tokens)
        known = _read_found(self.work / FOUND)
        total, done = len(recipe.open), 0
        tokens = sum(map(len, rows))
        ctx.emit(JobLog(f"calibration: {len(rows)} pieces, {tokens} tokens, {card.candidates_of(spec)} bits"))

        def on_load(done: int, total: int) -> None:
            ctx.check()
            ctx.emit(JobStage("load", done, total))

        def on_module(module: str, values: dict[int, float]) -> None:
            nonlocal done
            done += 1
            with (self.work / FOUND).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"module": module, "kl": values}) + "\n")
            worst = max(values.values())
            ctx.emit(JobStage("sensitivity", len(known) + done, total, f"{module}: KL up to {worst:.5f}"))
            self._saved("sensitivity", len(known) + done)

        progress = Progress(on_load, on_module, ctx.check)
        bits = sorted(set(spec.candidate_bits))
        return measure_all(self._open(), recipe.open, bits, self.general.group_size, rows, known, progress)

    def _allocate(self, recipe: Recipe, found: Table, budget: float) -> dict[str, int]:
        layers = [one.layer for one in recipe.open if one.layer is not None]
        outer = (min(layers, default=0), max(layers, default=0))
        choices = [_choice(one, found[one.module], self.general.group_size, outer) for one in recipe.open]
        try:
            return allocate(choices, budget)
        except OutOfReach as error:  # was looked at before; so this is a mistake here
            raise refuse(ErrorCode.INTERNAL, f"the budget of {budget:.0f} bytes is not {error}") from None

    def _keep_sensitivity(self, found: Table, recipe: Recipe) -> None:
        """`sensitivity.json` of the result."""
        modules = {
            one.module: {
                "bits": recipe.schemes[one.module].bits,
                "kl": {
                    str(bits): value if math.isfinite(value) else None
                    for bits, value in sorted(found[one.module].items())
                },
            }
            for one in recipe.open
        }
        spec = self.spec
        head = {"target_bpw": spec.target_bpw, "candidate_bits": sorted(set(spec.candidate_bits))}
        text = json.dumps({**head, "modules": modules}, indent=1)
        (self.scratch / card.SENSITIVITY).write_text(text + "\n", encoding="utf-8")

    # ------------------------------------------------------------ files

    def _write(self, shards: Sequence[Shard]) -> None:
        ctx = self.ctx
        total = sum(shard.num_bytes for shard in shards)

        def on_tensor(done: int) -> None:
            ctx.check()
            ctx.emit(JobStage("quantize", done, total))

        def on_shard(number: int) -> None:
            self._saved("shards", number)

        write_all(shards, self.shards, on_tensor, on_shard)

    def _saved(self, what: str, count: int) -> None:
        if self.ctx.work is not None:
            self.ctx.emit(JobSaved(what, count))

    def _place(self, shards: Sequence[Shard]) -> None:
        """The shards beside the other files, without a second copy where the disk can do that."""
        for shard in shards:
            try:
                os.link(self.shards / shard.file, self.scratch / shard.file)
            except OSError:
                shutil.copyfile(self.shards / shard.file, self.scratch / shard.file)

    def _measure(self, held_out: Sequence[Sequence[int]]) -> Measured:
        ctx = self.ctx

        def tell(done: int, total: int) -> None:
            ctx.check()
            ctx.emit(JobStage("measure", done, total))

        found = measure(self.scratch, held_out, self.path, tell)
        for what, value in card.measured_rows(found):
            ctx.emit(JobLog(f"{what}: {value}"))
        mx.clear_cache()
        return found


def _choice(matrix: Matrix, found: dict[int, float], group: int, outer: tuple[int, int]) -> Choice:
    """A matrix as the allocation sees it. Protected: outside of the layers, in the outer ones, and shared experts."""
    return Choice(
        matrix.module,
        {bits: matrix.bytes_as(Scheme("affine", bits, group)) for bits in found},
        found,
        matrix.layer,
        matrix.is_attention,
        matrix.layer is None or matrix.layer in outer or any(part in matrix.module for part in _PROTECTED),
    )


def _read_found(file: Path) -> Table:
    """What was found before; a line that was being written when its job was killed is as if it were not there."""
    found: Table = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return found
    for line in lines:
        try:
            one = json.loads(line)
            found[one["module"]] = {int(bits): float(value) for bits, value in one["kl"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    if lines and not lines[-1].endswith("\n"):
        file.write_text("".join(line for line in lines if line.endswith("\n")), encoding="utf-8")
    return found


def _published(ctx: JobContext) -> JobDone | None:
    """What an earlier start of this very job has published. Raises `Refused` (conflict) where something else is."""
    assert ctx.output is not None
    if not ctx.output.exists():
        return None
    try:
        job = json.loads((ctx.output / card.CARD).read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):
        job = None
    if ctx.work is not None and job == ctx.work.name:
        return JobDone(str(ctx.output), "was finished before")
    raise _taken(ctx.output)


def _taken(output: Path) -> Refused:
    return refuse(ErrorCode.CONFLICT, f"{output} exists; choose another name, or remove it")


def _no_room(spec: Quantize, error: Exception) -> Refused:
    peak = format_bytes(mx.get_peak_memory())
    ways = (
        "fewer calibration_tokens, or leave target_bpw out"
        if spec.target_bpw is not None
        else "measure false"
    )
    reason = " ".join(str(error).split())[:200]
    return refuse(ErrorCode.CANNOT_FIT, f"out of memory, at {peak} ({reason}); try {ways}")


def _short(found: Measured) -> str:
    assert found.divergence is not None
    assert found.reference is not None
    return (
        f", KL {found.divergence.mean:.4f}, perplexity {found.perplexity.value:.2f} "
        f"(the source {found.reference.value:.2f})"
    )


def _digest(spec: Quantize, source: Source) -> str:
    """Of what the result depends on: settings, versions, texts; of the model the sizes and times of its files."""
    digest = hashlib.sha256(msgspec.json.encode(spec))
    digest.update(f"{VERSION} {mlxd_version} {metadata.version('mlx')}\n".encode())
    path = Path(spec.model)
    for shard in source.checkpoint.shards:
        state = (path / shard.file).stat()
        digest.update(f"{shard.file} {state.st_size} {state.st_mtime_ns}\n".encode())
    digest.update(json.dumps(source.written, sort_keys=True).encode())
    if spec.calibration:
        file = Path(spec.calibration)
        digest.update(file.read_bytes() if file.is_file() else b"")
    digest.update((path / INDEX).read_bytes() if (path / INDEX).is_file() else b"")
    return digest.hexdigest()
