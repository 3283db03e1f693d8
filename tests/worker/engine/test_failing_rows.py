"""Logits that are not numbers: the row fails with its name, its KV is not kept, everybody else goes on."""

import queue
from collections.abc import Iterator

import mlx.core as mx
import pytest

from shared.errors import ErrorCode
from tests.fakes.model import SuccessorModel
from worker.cache.prefix import PrefixCache
from worker.engine.engine import Engine, Loaded, Output
from worker.engine.sequence import SamplingPlan, Sequence
from worker.unsound import no_numbers

PATIENCE_S = 20.0
BROKEN = 50
"""After this token the model gives NaN."""


class BrokenModel(SuccessorModel):
    def head(self, hidden: mx.array) -> mx.array:
        is_broken = mx.argmax(hidden, axis=-1, keepdims=True) == self.follow(BROKEN)
        return mx.where(is_broken, mx.nan, hidden)


@pytest.fixture
def engine() -> Iterator[tuple[Engine, Loaded, "queue.SimpleQueue[Output]"]]:
    heard: queue.SimpleQueue[Output] = queue.SimpleQueue()
    faults: list[BaseException] = []
    engine = Engine(lambda outputs: [heard.put(output) for output in outputs] and None, faults.append)

    def build() -> Loaded:
        model = BrokenModel()
        prefix = PrefixCache(1 << 20, model.regime)
        return Loaded(model, prefix, 4, 8, description={"dtype": "float32"})

    loaded = engine.load(build).result(PATIENCE_S)
    yield engine, loaded, heard
    engine.close()
    assert faults == []


@pytest.mark.parametrize("plan", [SamplingPlan(), SamplingPlan(0.5), SamplingPlan(0.5, 0.9, 5, logprobs=2)])
@pytest.mark.parametrize("start", [BROKEN, BROKEN - 1, BROKEN - 5])
def test_a_row_without_numbers_fails_by_name_and_the_others_go_on(engine, plan, start):
    running, loaded, heard = engine
    for name, first in (("good", 1), ("bad", start), ("other", 60)):
        running.submit(Sequence(name, [first] * 20, 12, plan, 3, frozenset()))
    told: dict[str, list[Output]] = {}
    open_rows = {"good", "bad", "other"}
    while open_rows:
        output = heard.get(timeout=PATIENCE_S)
        told.setdefault(output.id, []).append(output)
        if output.finish or output.failure:
            open_rows.discard(output.id)
    said = {name: [o.token for o in outputs if o.token is not None] for name, outputs in told.items()}
    assert said["good"] == list(range(2, 14))
    assert said["other"] == list(range(61, 73))
    assert said["bad"] == list(range(start + 1, BROKEN + 1))
    failure = told["bad"][-1].failure
    assert failure.code is ErrorCode.ENGINE_FAULT
    assert failure.message.startswith(
        f"request bad: the model's logits for answer token {len(said['bad']) + 1} are not"
    )
    assert "in float32, the widest there is: the model's files are damaged" in failure.message
    assert "load" not in failure.message
    running.call(lambda: None).result(PATIENCE_S)
    assert (
        loaded.prefix.take([*[start] * 20, *said["bad"], 1])[0] is None
    )  # what may be wrong is not used again
    assert loaded.prefix.take([*[1] * 20, 2, 3, 4])[0] is not None
    assert running.stats().active == 0


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("float16", "x are not numbers (NaN or infinite), in float16; load the model with dtype float32"),
        ("", "x are not numbers (NaN or infinite); load the model with dtype float32"),
    ],
)
def test_a_wider_type_is_advised_where_there_is_one(dtype, said):
    assert no_numbers("x", dtype) == said
