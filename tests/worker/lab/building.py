"""What tests of data sets share: one run of the job, its files, and a template without the job."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.jobs import JobDone, JobEvent
from shared.lab import Dataset
from shared.lab_templates import checked_inputs
from worker.jobs import dataset
from worker.jobs.context import JobContext
from worker.lab.dataset import maker_of
from worker.lab.dataset.form import Answer, Drop, Dropped, Kit, Made, Message

Say = Callable[[list[Message]], str | Answer]


def build(
    spec: Dataset,
    output: Path,
    *,
    work: Path | None = None,
    events: list[JobEvent] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> JobDone:
    """One run of the job. Raises `Refused`."""
    told = [] if events is None else events
    return dataset.run(spec, JobContext(told.append, should_stop, output, work))


def rows(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    """Of one file of a data set."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


class Model:
    """Stands for the server: what it was asked, and what it says."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[list[Message]] = []
        self.tools: list[Any] = []
        self.seeds: list[int] = []

    async def ask(self, messages: list[Message], *, seed: int, tools: list[Any] | None = None) -> Answer:
        self.asked.append(messages)
        self.seeds.append(seed)
        self.tools.append(tools)
        said = self.say(messages)
        return Answer(said) if isinstance(said, str) else said


def made(
    template: str, inputs: dict[str, Any], say: Say = lambda messages: "yes", seed: int = 42
) -> tuple[list[Made], list[Drop], Model]:
    """What every unit of a template comes to, what did not become a unit, and what the model was asked."""
    model = Model(say)

    async def no_viewer(path: str, query: Any) -> Any:
        raise AssertionError("this template asks no viewer")

    async def work() -> tuple[list[Made], list[Drop]]:
        kit = Kit(checked_inputs(template, inputs), seed, model.ask, no_viewer)
        maker = maker_of(template)
        plan = await maker.plan(kit)
        found = []
        for number, unit in enumerate(plan.units):
            try:
                found.append(await maker.make(unit, kit.of(number)))
            except Dropped as dropped:
                found.append(Made(dropped=[Drop(unit.where, str(dropped))]))
        return found, list(plan.dropped)

    found, dropped = asyncio.run(work())
    return found, dropped, model


def rows_of(found: list[Made]) -> list[dict[str, Any]]:
    return [row for one in found for row in one.rows]


def drops_of(found: list[Made]) -> list[tuple[str, str]]:
    return [(drop.where, drop.reason) for one in found for drop in one.dropped]
