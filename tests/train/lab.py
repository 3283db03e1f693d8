"""Tiny models and data for tests of training."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared import dataset
from shared.jobs import JobDone, JobEvent, JobMetric
from shared.lab import Finetune
from tests.oracles import checkpoints
from worker.datasets.examples import Writer, write_all
from worker.jobs import finetune
from worker.jobs.context import JobContext
from worker.models import LoadedModel, load_model
from worker.train.adapter import Arrays, attach
from worker.train.gradients import Graph, graph_of
from worker.train.trainer import Trainer

WORDS = ("the", "harbour", "keeper", "counted", "waves", "and", "wrote", "them", "down", "while", "lamps")


AFFINE = {"bits": 4, "group_size": 32}


def model_of(name: str, folder: Path, **how: Any) -> Path:
    """A case of the oracles as a model directory; `how`: as `checkpoints.write_case` takes it."""
    return checkpoints.write_case(name, folder / name, **how)


def graph_for(
    name: str, folder: Path, quantize: dict[str, Any] | None = None, **options: Any
) -> tuple[Graph, LoadedModel, Finetune]:
    """A tiny model with an adapter beside its projections."""
    path = model_of(name, folder, quantize=quantize)
    spec = Finetune(model=str(path), data="", **options)
    loaded = load_model(path)
    return graph_of(loaded, attach(loaded, spec)), loaded, spec


def disturbed(graph: Graph, seed: int = 1, by: float = 0.1) -> Arrays:
    """Arrays of which B is no longer zero, so that A has a gradient too."""
    key, found = mx.random.key(seed), {}
    for name, one in graph.adapter.initial().items():
        key, own = mx.random.split(key)
        found[name] = one + by * mx.random.normal(one.shape, key=own)
    mx.eval(found)
    return found


def words(count: int, random_: random.Random) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(count))


def chats(count: int, seed: int = 3, longest: int = 5) -> list[dict[str, Any]]:
    """Rows of the `messages` format, of several lengths."""
    one = random.Random(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": words(one.randint(1, 4), one)},
                {"role": "assistant", "content": words(one.randint(1, longest), one)},
            ]
        }
        for _ in range(count)
    ]


def preferences(count: int, seed: int = 4) -> list[dict[str, Any]]:
    one = random.Random(seed)
    return [
        {
            "prompt": words(one.randint(1, 3), one),
            "chosen": words(one.randint(2, 4), one),
            "rejected": words(one.randint(2, 4), one).upper(),
        }
        for _ in range(count)
    ]


def write_data(
    folder: Path, train: Iterable[dict[str, Any]], valid: Iterable[dict[str, Any]] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("valid", valid)):
        if rows is not None:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def trainer_of(spec: Finetune) -> Trainer:
    """Everything that the job does before its first step."""
    data = dataset.read(spec.data, split=False)
    writer = Writer(Path(spec.model))
    train, valid = (
        write_all(writer, rows, spec.sft_scope, spec.max_seq_length, lambda number: None)[0]
        for rows in (data.train, data.valid)
    )
    loaded = load_model(Path(spec.model))
    adapter = attach(loaded, spec)
    return Trainer(graph_of(loaded, adapter), spec, train, valid, adapter.initial())


def run_job(
    spec: Finetune,
    output: Path,
    *,
    work: Path | None = None,
    resume: str = "",
    on_event: Callable[[JobEvent], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[JobDone, list[JobEvent]]:
    """-> how it ended, and what was told."""
    events: list[JobEvent] = []

    def emit(event: JobEvent) -> None:
        events.append(event)
        on_event(event)

    return finetune.run(spec, JobContext(emit, should_stop, output, work, resume)), events


def curve(events: list[JobEvent], kind: str = "train") -> list[float]:
    return [event.loss for event in events if isinstance(event, JobMetric) and event.kind == kind]
