"""Throughput of a served model: what is asked, what is made of the times, and what it says where nothing comes."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobLog, JobStage
from shared.lab import Benchmark, Evaluate
from tests.fakes.answers import Answers
from worker.jobs import benchmark, evaluate
from worker.jobs.context import JobContext
from worker.lab import harness
from worker.lab.throughput import Answered, Bench, Point


class Ticks:
    """A clock that goes on by one at every look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def measured(url: str, prompt: int, streams: int, most: int, rounds: int = 1) -> Point:
    async def work() -> Point:
        bench = Bench(url, "m", seed=3, clock=Ticks())
        try:
            await bench.warm_up()
            return await bench.measure(prompt, streams, most, rounds)
        finally:
            await bench.close()

    return asyncio.run(work())


def test_a_lab_benchmark_times_the_first_token_and_those_behind_it() -> None:
    with Answers() as server:
        point = measured(server.url, 5, 1, 4)
        # One look as it begins, then one at each of four tokens: 1, 2, 3 and 4 ticks after it.
        assert (point.ttft_s, point.decode_tps) == (1.0, 1.0)
        assert point.prompt_tps == 5.0
        assert (point.prompt_tokens, point.streams, point.completion_tokens) == (5, 1, 4.0)
        assert point.total_tps == pytest.approx(4 / 6)
        body = server.asked[-1]
    assert len(body["prompt"]) == 5
    assert all(isinstance(token, int) for token in body["prompt"])
    assert (body["max_tokens"], body["temperature"], body["stream"], body["model"]) == (4, 0, True, "m")


@pytest.mark.parametrize(
    ("answered", "rate"),
    [
        (Answered(1.0, 3.0, 5), 2.0),
        (Answered(1.0, 3.0, 5, 3), 5 / 3),  # most came with the first text
        (Answered(1.0, 2.0, 6, 3), 3.0),
        (Answered(2.0, 2.0, 8, 8), 4.0),
        (Answered(2.0, 2.0, 1), 0.5),
    ],
)
def test_a_lab_rate_is_that_behind_the_first_text_if_much_comes_behind_it(
    answered: Answered, rate: float
) -> None:
    assert answered.rate == rate


def test_a_lab_benchmark_asks_each_stream_something_else() -> None:
    with Answers() as server:
        measured(server.url, 16, 3, 2, rounds=2)
        prompts = [tuple(body["prompt"]) for body in server.asked]
    assert len(prompts) == 1 + 3 * 2  # the first one loads the model
    assert len(set(prompts)) == len(prompts)


def run(spec: Benchmark, events: list[JobEvent] | None = None, stop: bool = False) -> Any:
    told = [] if events is None else events
    return benchmark.run(spec, JobContext(told.append, lambda: stop))


def test_a_lab_benchmark_measures_every_size_by_every_number(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    with Answers() as server:
        done = run(
            Benchmark(
                model="m",
                url=server.url,
                prompt_tokens=[4, 8],
                streams=[1, 2],
                completion_tokens=3,
                rounds=1,
            ),
            events,
        )
    points = done.result["points"]
    assert [(point["prompt_tokens"], point["streams"]) for point in points] == [
        (4, 1),
        (4, 2),
        (8, 1),
        (8, 2),
    ]
    assert set(done.result["numbers"]) == {
        f"{name}/{at}"
        for name in ("ttft_s", "decode_tps", "total_tps")
        for at in ("4x1", "4x2", "8x1", "8x2")
    }
    assert all(value > 0 for value in done.result["numbers"].values())
    stages = [event for event in events if isinstance(event, JobStage)]
    assert stages[0].stage == "warm up"
    assert (stages[-1].done, stages[-1].total) == (4, 4)
    assert len([event for event in events if isinstance(event, JobLog)]) == 4
    assert "first token after" in done.summary


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("", ErrorCode.INVALID_REQUEST, "name the url"),
        ("http://127.0.0.1:9", ErrorCode.ENGINE_UNAVAILABLE, "does not answer"),
        ("not an address", ErrorCode.ENGINE_UNAVAILABLE, "does not answer"),
    ],
)
def test_a_lab_benchmark_without_a_server_is_refused(url: str, code: ErrorCode, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        run(Benchmark(model="m", url=url))
    assert refused.value.failure.code is code


def test_a_lab_benchmark_can_be_stopped() -> None:
    with Answers() as server, pytest.raises(Refused) as refused:
        run(Benchmark(model="m", url=server.url), stop=True)
    assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN


# ---------------------------------------------------------------- tasks

RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "sample_len": 4,
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": "N/A",
            "acc,none": 0.25,
            "broken,none": float("nan"),
        }
    }
}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Stands for the library that is not installed: what it was asked, and what it answers or raises."""
    given: dict[str, Any] = {"answer": RESULTS, "asked": None}

    def simple_evaluate(**asked: Any) -> Any:
        given["asked"] = asked
        if isinstance(given["answer"], Exception):
            raise given["answer"]
        return given["answer"]

    module = ModuleType("lm_eval")
    module.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    before = sys.modules.get("lm_eval")
    sys.modules["lm_eval"] = module
    yield given
    del sys.modules["lm_eval"]
    if before is not None:
        sys.modules["lm_eval"] = before


def test_lab_tasks_are_asked_of_the_served_model(library: dict[str, Any]) -> None:
    numbers = harness.run_tasks(["gsm8k"], "org/tiny", "http://here:1/", 5, 7)
    assert numbers == {"gsm8k/exact_match,strict-match": 0.5, "gsm8k/acc": 0.25}
    asked = library["asked"]
    assert asked["model"] == "local-completions"
    assert asked["model_args"]["base_url"] == "http://here:1/v1/completions"
    assert asked["model_args"]["model"] == "org/tiny"
    assert (asked["tasks"], asked["limit"], asked["random_seed"]) == (["gsm8k"], 5, 7)
    harness.run_tasks(["gsm8k"], "org/tiny", "http://here:1", 0, 7)
    assert library["asked"]["limit"] is None


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (Evaluate(model="/models/tiny"), "/models/tiny"),
        (Evaluate(model="/models/tiny", model_id="org/tiny"), "org/tiny"),
        (Evaluate(model="/m", model_id="org/tiny", adapter="/adapters/mine/"), "org/tiny:mine"),
    ],
)
def test_lab_tasks_ask_for_the_model_with_its_adapter(spec: Evaluate, name: str) -> None:
    assert evaluate.served_name(spec) == name


def test_lab_tasks_that_cannot_be_run_say_why_in_one_line(library: dict[str, Any]) -> None:
    library["answer"] = ValueError("no such\ntask: mmlu")
    with pytest.raises(Refused, match="could not run mmlu: ValueError: no such task: mmlu") as refused:
        harness.run_tasks(["mmlu"], "m", "http://here", 0, 0)
    assert refused.value.failure.code is ErrorCode.UNSUPPORTED
    with pytest.raises(Refused, match="name the url"):
        harness.run_tasks(["mmlu"], "m", "", 0, 0)


def test_lab_tasks_without_the_extra_are_refused_by_its_name() -> None:
    if "lm_eval" in sys.modules:
        pytest.skip("lm-evaluation-harness is installed")
    spec = Evaluate(model="/nowhere", tasks=["gsm8k"], url="http://here")
    with pytest.raises(Refused, match=r"install mlxd\[eval\]") as refused:
        evaluate.run(spec, JobContext(lambda event: None, lambda: False))
    assert refused.value.failure.param == "tasks"
