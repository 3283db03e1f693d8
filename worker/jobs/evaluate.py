"""Measure a model: perplexity on a text, divergence from a reference, tasks of lm-evaluation-harness.

Stages: read, load, score, tasks. What is found is the result of the job, in numbers by name.
"""

import re
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from shared.jobs import JobDone, JobStage
from shared.lab import Evaluate
from worker.jobs.context import JobContext
from worker.lab import harness
from worker.lab.scoring import rows_of, score
from worker.measure.compare import Measured

_NO_ROOM = re.compile(r"alloc|out of memory", re.IGNORECASE)


def run(spec: Evaluate, ctx: JobContext) -> JobDone:
    """Raises `Refused`: invalid_request, bad_checkpoint, unsupported, cannot_fit (out of memory), shutting_down."""
    if spec.tasks:
        harness.require()  # before anything that takes long
    ctx.emit(JobStage("read", message=spec.data))
    rows = rows_of(Path(spec.model), spec.data, spec.num_samples, spec.sequence_length, spec.seed)

    def tell(stage: str, done: int, total: int) -> None:
        ctx.check()
        ctx.emit(JobStage(stage, done, total))

    try:
        found = score(Path(spec.model), rows, tell, adapter=spec.adapter, reference=spec.reference)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or _NO_ROOM.search(str(error)):
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"out of memory while measuring {spec.model_id or spec.model}; try a smaller sequence_length",
            ) from None
        raise
    numbers = numbers_of(found)
    numbers["peak_bytes"] = mx.get_peak_memory()
    if spec.tasks:
        ctx.check()
        ctx.emit(JobStage("tasks", message=", ".join(spec.tasks)))
        numbers |= harness.run_tasks(spec.tasks, served_name(spec), spec.url, spec.task_limit, spec.seed)
    return JobDone("", _summary(found), {"numbers": numbers, "versions": {"mlx": version("mlx")}})


def served_name(spec: Evaluate) -> str:
    """What clients of the server call it: the model, with its adapter."""
    name = spec.model_id or spec.model
    return f"{name}:{Path(spec.adapter).name}" if spec.adapter else name


def numbers_of(found: Measured) -> dict[str, float]:
    """By the names under which they are kept."""
    numbers: dict[str, float] = {
        "perplexity": found.perplexity.value,
        "perplexity_error": found.perplexity.error,
        "tokens": found.perplexity.tokens,
    }
    if found.reference is not None and found.divergence is not None:
        apart = found.divergence
        numbers |= {
            "reference_perplexity": found.reference.value,
            "kl_mean": apart.mean,
            "kl_median": apart.median,
            "kl_p95": apart.p95,
            "same_top": apart.same_top,
        }
    return numbers


def _summary(found: Measured) -> str:
    text = f"perplexity {found.perplexity.value:.3f} ± {found.perplexity.error:.3f}"
    if found.reference is not None and found.divergence is not None:
        text += f" (reference {found.reference.value:.3f}), KL {found.divergence.mean:.5f}"
    return text
