"""Gradients: against finite differences in every family, and every way of working them out against the plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import worker.layers.moe
import worker.models.gemma4
from tests.oracles import checkpoints
from tests.train.lab import AFFINE, disturbed, graph_for
from tests.worker.models.running import one_case_a_family
from worker.datasets.batches import pack
from worker.datasets.examples import Example
from worker.layers.batch import solo
from worker.layers.moe import top_k
from worker.train.adapter import Arrays
from worker.train.gradients import Graph, Loss
from worker.train.losses import log_probabilities, mean_cross_entropy, row_sums
from worker.train.rows import batch_of
from worker.train.trainer import scored_of

EXAMPLES = [
    Example(list(range(5, 45)), 7),
    Example(list(range(60, 90)), 20),
    Example([9, 3], 1),
    Example(list(range(100, 103)), 2),
]
PACKED = pack(EXAMPLES, response=True)
WAYS: dict[str, dict[str, Any]] = {
    "by layer": {"by_layer": True},
    "segments of 1": {"segment": 1},
    "segments of 2": {"segment": 2},
    "one segment": {"segment": 100},
    "segments of 2 by layer": {"segment": 2, "by_layer": True},
}


def loss_of(graph: Graph, chunk: int = 0) -> Loss:
    scored = scored_of(PACKED)
    return lambda hidden: (mean_cross_entropy(graph.model.head, hidden, scored, chunk), {})


def preference_of(graph: Graph, chunk: int = 0) -> Loss:
    """One whose slope depends on the sums over rows."""
    scored = scored_of(PACKED)

    def loss(hidden: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        sums = row_sums(log_probabilities(graph.model.head, hidden, scored, chunk), PACKED.answers)
        return mx.logaddexp(mx.array(0.0), sums[1::2] - sums[0::2]).mean(), {}

    return loss


def measured(graph: Graph, arrays: Arrays, loss: Loss, **way: Any) -> tuple[float, dict[str, np.ndarray]]:
    value, _, grads = graph.value_and_grad(batch_of(graph.model.layout, PACKED.rows), loss, arrays, **way)
    mx.eval(value, grads)
    return value.item(), {name: np.array(one) for name, one in grads.items()}


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The greatest, measured by the greatest value there is."""
    assert found.keys() == wanted.keys()
    scale = max(float(np.abs(one).max()) for one in wanted.values())
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted) / scale


class Routes:
    """Experts stay those of the first pass: a tiny step over the border of two of them is no slope."""

    def __init__(self) -> None:
        self.chosen: list[mx.array] | None = None
        self.place = 0

    def begin(self) -> None:
        """Before each pass."""
        self.place = 0
        if self.chosen is None:
            self.chosen = []

    def top_k(self, scores: mx.array, k: int) -> mx.array:
        if self.chosen is None:
            return top_k(scores, k)
        if self.place == len(self.chosen):
            self.chosen.append(top_k(scores, k))
        self.place += 1
        return self.chosen[self.place - 1]


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Routes:
    found = Routes()
    for module in (worker.layers.moe, worker.models.gemma4):
        monkeypatch.setattr(module, "top_k", found.top_k)
    return found


@pytest.mark.parametrize("name", one_case_a_family())
def test_gradients_are_slopes(name: str, routes: Routes, tmp_path: Path) -> None:
    graph, _, _ = graph_for(name, tmp_path, rank=2)
    arrays = disturbed(graph)
    loss = loss_of(graph)

    def value_at(step: float) -> float:
        routes.begin()
        graph.adapter.arrays = {key: one + step * direction[key] for key, one in arrays.items()}
        return loss(graph.hidden(batch_of(graph.model.layout, PACKED.rows)))[0].item()  # type: ignore[return-value]

    direction = arrays
    value_at(0.0)
    routes.begin()
    _, grads = measured(graph, arrays, loss)
    direction = {name: mx.array(one) for name, one in grads.items()}
    steep = sum(float(np.square(one).sum()) for one in grads.values())
    step = 2e-3 / steep**0.5
    slope = (value_at(step) - value_at(-step)) / (2 * step)
    assert slope == pytest.approx(steep, rel=2e-2)
    assert all(np.abs(one).max() > 0 for one in grads.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama_tied", "gemma4_e", "qwen3_5", "qwen3_moe", "deepseek_v3"])
def test_gradients_are_the_same_whichever_way(name: str, way: str, tmp_path: Path) -> None:
    graph, _, _ = graph_for(name, tmp_path, rank=2)
    arrays = disturbed(graph)
    loss, plain = measured(graph, arrays, loss_of(graph))
    found, grads = measured(graph, arrays, loss_of(graph), **WAYS[way])
    assert found == pytest.approx(loss, abs=1e-6)
    assert difference(grads, plain) < 1e-5


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("way", ["by layer", "segments of 2"])
def test_dropout_is_the_same_when_a_layer_is_computed_again(kind: str, way: str, tmp_path: Path) -> None:
    graph, _, _ = graph_for("llama_tied", tmp_path, kind=kind, lora_dropout=0.3, quantize=AFFINE)
    arrays = disturbed(graph)
    found = []
    for options in ({}, WAYS[way]):
        graph.adapter.begin_step(5)
        found.append(measured(graph, arrays, loss_of(graph), **options))
    (loss, plain), (again, grads) = found
    assert again == pytest.approx(loss, abs=1e-6)
    assert difference(grads, plain) < 1e-5
    graph.adapter.begin_step(6)
    assert measured(graph, arrays, loss_of(graph))[0] != pytest.approx(loss, abs=1e-4)
    graph.adapter.begin_step(None)
    assert measured(graph, arrays, loss_of(graph))[0] != pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("make", [loss_of, preference_of])
@pytest.mark.parametrize("chunk", [1, 7, 32, 10_000])
@pytest.mark.parametrize("name", ["llama_tied", "gemma4_e"])  # the latter bounds its logits
def test_a_head_in_chunks_is_the_head(
    name: str, chunk: int, make: Callable[[Graph, int], Loss], tmp_path: Path
) -> None:
    graph, _, _ = graph_for(name, tmp_path, rank=2)
    arrays = disturbed(graph)
    loss, plain = measured(graph, arrays, make(graph, 0))
    found, grads = measured(graph, arrays, make(graph, chunk))
    assert found == pytest.approx(loss, rel=1e-6)
    assert difference(grads, plain) < 1e-5


@pytest.mark.parametrize("name", checkpoints.names())
def test_rows_of_a_batch_are_what_they_are_alone(name: str, tmp_path: Path) -> None:
    graph, loaded, _ = graph_for(name, tmp_path)
    graph.adapter.arrays = None
    together = graph.hidden(batch_of(graph.model.layout, PACKED.rows))
    begin = 0
    for row in PACKED.rows:
        alone = loaded.model(solo(mx.array(row), loaded.model.make_caches(len(row))))
        assert mx.allclose(together[begin : begin + len(row)], alone, atol=2e-4).item()
        begin += len(row)


@pytest.mark.parametrize("depth", [1, 2])
def test_layers_that_are_not_trained_have_no_gradients(depth: int, tmp_path: Path) -> None:
    graph, _, _ = graph_for("llama_tied", tmp_path, num_layers=depth)
    arrays = disturbed(graph)
    assert {name.split(".")[2] for name in arrays} == {str(2 - n) for n in range(depth)}
    _, plain = measured(graph, arrays, loss_of(graph))
    for way in WAYS.values():
        assert difference(measured(graph, arrays, loss_of(graph), **way)[1], plain) < 1e-5
