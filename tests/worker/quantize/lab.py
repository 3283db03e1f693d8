"""Running a quantize job in tests, and looking at what it made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from shared.jobs import JobDone, JobEvent
from shared.lab import Quantize
from tests.oracles.checkpoints import reference
from tests.worker.models.running import logits_of
from worker.jobs import quantize
from worker.jobs.context import JobContext
from worker.jobs.quantize_shards import SHARD_BYTES
from worker.models import load_model

UNIFORM: dict[str, Any] = {"bits": 4, "group_size": 32, "measure": False}


def run_job(
    spec: Quantize,
    output: Path,
    *,
    work: Path | None = None,
    on_event: Callable[[JobEvent], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[JobDone, list[JobEvent]]:
    """-> how it ended, and what was told."""
    events: list[JobEvent] = []

    def emit(event: JobEvent) -> None:
        events.append(event)
        on_event(event)

    done = quantize.run(spec, JobContext(emit, should_stop, output, work), shard_bytes)
    return done, events


def tensors_of(folder: Path) -> dict[str, mx.array]:
    """Everything in the files of a model."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        found.update(loaded)
    return found


def raw(tensor: mx.array) -> bytes:
    """Its bytes."""
    return bytes(memoryview(mx.contiguous(tensor).reshape(-1).view(mx.uint8)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def logits(folder: Path, case: str) -> np.ndarray:
    """Of the reference prompt of a case."""
    return logits_of(load_model(folder).model, reference(case)["input_ids"], [1 << 30])
