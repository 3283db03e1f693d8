"""What models were measured to be: kept once, found by model, compared with what they were before."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parent.db import MIGRATIONS, Database, _evaluations
from parent.jobs.evaluations import RESULT, Evaluation, Evaluations, compared, evaluation_of
from parent.jobs.states import Event
from parent.jobs.store import Jobs, Owner
from parent.jobs.view import view
from shared.jobs import JobSpec, NoopJob
from shared.lab import Benchmark, Dataset, Evaluate
from shared.version import VERSION

EVALUATE = Evaluate(model="/models/tiny", model_id="org/tiny", adapter="/adapters/mine/", num_samples=4)
RESULT_OF_IT = {"numbers": {"perplexity": 12.5}, "versions": {"mlx": "1"}, "points": [1]}


def using(folder: Path, work: Callable[[Evaluations, Jobs], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        db = Database(folder).open()
        try:
            return await work(Evaluations(db, lambda: 5.0), Jobs(db, lambda: 7.0))
        finally:
            await db.close()

    return asyncio.run(main())


async def ended(jobs: Jobs, spec: JobSpec, result: dict[str, Any] | None, *, how: Event = Event.DONE) -> str:
    """The id of a job that has run."""
    job = await jobs.create(spec)
    await jobs.admit_next(Owner(1, 1.0))
    await jobs.apply(job.id, Event.STARTED)
    if result is not None:
        await jobs.note(job.id, RESULT, result)
    if how is Event.DONE:
        await jobs.apply(job.id, Event.DONE, message="a summary")
    await jobs.apply(job.id, Event.EXIT)
    return job.id


def test_what_a_lab_job_found_is_kept_with_what_it_was_asked(tmp_path: Path) -> None:
    async def work(table: Evaluations, jobs: Jobs) -> None:
        job = await jobs.get(await ended(jobs, EVALUATE, RESULT_OF_IT))
        await table.take(job, jobs)
        await table.take(job, jobs)
        [one] = await table.find()
        assert (one.job_id, one.kind, one.model) == (job.id, "evaluate", "org/tiny:mine")
        assert one.what["num_samples"] == 4
        assert one.what["sequence_length"] == 512
        assert not one.what.keys() & {"model", "model_id", "adapter", "url"}
        assert (one.numbers, one.details) == ({"perplexity": 12.5}, {"points": [1]})
        assert one.versions == {"mlxd": VERSION, "mlx": "1"}
        assert (one.summary, one.at, one.before) == ("a summary", 7.0, None)

    using(tmp_path, work)


def test_lab_results_that_a_dead_server_did_not_keep_are_kept_by_the_next(tmp_path: Path) -> None:
    async def first(table: Evaluations, jobs: Jobs) -> None:
        await ended(jobs, EVALUATE, RESULT_OF_IT)
        await ended(jobs, Benchmark(model="org/tiny"), {"numbers": {"ttft_s/1x1": 0.1}})
        await ended(jobs, EVALUATE, RESULT_OF_IT, how=Event.EXIT)  # failed
        await ended(jobs, NoopJob(), {"numbers": {"x": 1.0}})
        await ended(jobs, EVALUATE, None)  # of an earlier version

    async def second(table: Evaluations, jobs: Jobs) -> None:
        assert await table.find() == []
        await table.catch_up(jobs)
        await table.catch_up(jobs)
        assert sorted(one.kind for one in await table.find()) == ["benchmark", "evaluate"]
        assert [one.kind for one in await table.find(kind="benchmark")] == ["benchmark"]
        assert [one.kind for one in await table.find(model="org/tiny:mine")] == ["evaluate"]
        assert len(await table.find(limit=1)) == 1

    using(tmp_path, first)
    using(tmp_path, second)


def test_a_lab_job_is_shown_without_the_length_of_its_texts(tmp_path: Path) -> None:
    async def work(table: Evaluations, jobs: Jobs) -> None:
        short = Dataset(template="sft_qa_pairs", inputs={"pairs_text": "Q: a\nA: b"})
        long = Dataset(template="sft_qa_pairs", inputs={"pairs_text": "x" * 20_000})
        for spec, text in ((short, "Q: a\nA: b"), (long, f"{'x' * 200}… (20000 characters)")):
            shown = msgspec.json.decode(msgspec.json.encode(view(await jobs.create(spec))))
            assert shown["spec"]["inputs"] == {"pairs_text": text}
            assert shown["spec"]["template"] == "sft_qa_pairs"

    using(tmp_path, work)


def test_a_database_from_before_lab_results_gets_their_table_and_keeps_its_jobs(tmp_path: Path) -> None:
    place = MIGRATIONS.index(_evaluations)

    async def before() -> str:
        db = Database(tmp_path, MIGRATIONS[:place]).open()
        try:
            return (await Jobs(db).create(NoopJob())).id
        finally:
            await db.close()

    job_id = asyncio.run(before())

    async def work(table: Evaluations, jobs: Jobs) -> None:
        assert (await jobs.get(job_id)).kind == "noop"
        await table.add(measured(1, 10))
        assert len(await table.find()) == 1

    using(tmp_path, work)


def measured(at: float, value: float, **more: Any) -> Evaluation:
    given: dict[str, Any] = {"job_id": str(at), "kind": "evaluate", "model": "m", "what": {"seed": 1}} | more
    return Evaluation(numbers={"perplexity": value}, at=at, **given)


def test_a_lab_result_is_compared_with_the_one_before_of_the_same_kind() -> None:
    rows = [
        measured(5, 50),
        measured(4, 40, model="other"),
        measured(3, 30, what={"seed": 2}),
        measured(2, 20, kind="benchmark"),
        measured(1, 10),
    ]
    before = [None if one.before is None else one.before["perplexity"] for one in compared(rows)]
    assert before == [10, None, None, None, None]
    assert [one.at for one in compared(rows)] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        (Evaluate(model="/models/tiny"), "/models/tiny"),
        (Evaluate(model="/models/tiny", model_id="org/tiny"), "org/tiny"),
        (Benchmark(model="org/tiny", url="http://here"), "org/tiny"),
    ],
)
def test_a_lab_result_is_of_the_model_as_people_call_it(spec: Evaluate | Benchmark, model: str) -> None:
    one = evaluation_of(spec, {}, job_id="j", summary="", at=0)
    assert (one.model, one.numbers) == (model, {})
