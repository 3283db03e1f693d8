"""Losses against their formulas in numpy, and the optimizer against MLX's own."""

import math

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from shared.lab import Finetune
from worker.datasets.batches import group, order_of, pack
from worker.datasets.examples import Example
from worker.train.losses import dpo, orpo
from worker.train.optimizer import clip, learning_rate, moments_of, norm_of, update

SUMS = np.array([-4.0, -9.0, -30.0, -2.5, -0.7, -0.7])
REFERENCE = np.array([-5.0, -8.0, -31.0, -2.0, -0.7, -0.7])
LENGTHS = np.array([3, 5, 8, 2, 1, 1])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_is_its_formula(beta: float) -> None:
    loss, told = dpo(mx.array(SUMS), mx.array(REFERENCE), beta)
    chosen, rejected = (SUMS - REFERENCE)[0::2], (SUMS - REFERENCE)[1::2]
    assert loss.item() == pytest.approx(-np.log(sigmoid(beta * (chosen - rejected))).mean(), rel=1e-5)
    assert told["margin"].item() == pytest.approx((beta * (chosen - rejected)).mean(), rel=1e-5)
    assert told["accuracy"].item() == pytest.approx((chosen > rejected).mean())


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
def test_orpo_is_its_formula(weight: float) -> None:
    loss, told = orpo(mx.array(SUMS), mx.array(LENGTHS), mx.array(1.25), weight)
    p = np.exp(SUMS / LENGTHS)
    odds = p / (1 - p)
    ratio = odds[0::2] / odds[1::2]
    wanted = 1.25 + weight * -np.log(sigmoid(np.log(ratio))).mean()
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert told["accuracy"].item() == pytest.approx((ratio > 1).mean())


def test_a_certain_response_has_finite_odds() -> None:
    loss, _ = orpo(mx.array([0.0, -3.0]), mx.array([2, 2]), mx.array(0.0), 0.1)
    assert math.isfinite(loss.item())  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_a_step_is_that_of_mlx(decay: float) -> None:
    spec = Finetune(model="", data="", weight_decay=decay)
    ours = {"q.lora_a": mx.random.normal((5, 3)), "q.lora_b": mx.random.normal((3, 4))}
    theirs = dict(ours)
    moments = moments_of(ours)
    optimizer = optim.AdamW(learning_rate=0.01, weight_decay=decay)
    for _ in range(5):
        grads = {name: mx.random.normal(one.shape) for name, one in ours.items()}
        ours, moments = update(ours, grads, moments, spec, 0.01)
        theirs = optimizer.apply_gradients(grads, theirs)
    for name, one in ours.items():
        assert mx.allclose(one, theirs[name], rtol=1e-6, atol=1e-7).item()


def test_b_learns_faster_and_magnitudes_do_not_decay() -> None:
    arrays = {name: mx.ones((2,)) for name in ("q.lora_a", "q.lora_b", "q.m")}
    grads = {name: mx.ones((2,)) for name in arrays}
    spec = Finetune(model="", data="", lora_plus_ratio=4.0, weight_decay=0.0)
    found, _ = update(arrays, grads, moments_of(arrays), spec, 1e-3)
    steps = {name: (1 - one[0]).item() for name, one in found.items()}
    assert steps["q.lora_b"] == pytest.approx(4 * steps["q.lora_a"], rel=1e-3)  # type: ignore[operator]
    still = {name: mx.zeros((2,)) for name in arrays}
    found, _ = update(arrays, still, moments_of(arrays), Finetune(model="", data="", weight_decay=0.5), 0.1)
    assert [found[name][0].item() for name in arrays] == pytest.approx([0.95, 0.95, 1.0])


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0]),
        ("constant", 2, [0.5, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1.0, 1.0, 0.5]),
        ("cosine", 0, [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        ("cosine", 4, [0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_schedules(schedule: str, warmup: int, wanted: list[float]) -> None:
    spec = Finetune(
        model="",
        data="",
        iters=4,
        learning_rate=1.0,
        lr_schedule=schedule,  # type: ignore[arg-type]
        warmup_iters=warmup,
    )
    assert [learning_rate(spec, step) for step in range(1, 5)] == pytest.approx(wanted)


@pytest.mark.parametrize(("method", "rate"), [("sft", 2e-4), ("dpo", 5e-5), ("orpo", 1e-5)])
def test_each_method_has_its_rate(method: str, rate: float) -> None:
    assert learning_rate(Finetune(model="", data="", method=method), 1) == rate  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "length"), [(0.0, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_clipping_shortens_only_what_is_too_long(most: float, length: float) -> None:
    grads = {"a": mx.array([3.0]), "b": mx.array([4.0])}
    assert norm_of(clip(grads, norm_of(grads), most)).item() == pytest.approx(length, rel=1e-5)


def test_the_last_token_predicts_nothing_and_prompts_count_only_where_asked() -> None:
    examples = [Example([1, 2, 3, 4], 2), Example([5, 6], 1), Example([7, 8, 9], 0)]
    whole = pack(examples, response=False)
    assert whole.rows == [[1, 2, 3], [5], [7, 8]]
    assert (whole.places, whole.targets) == ([0, 1, 2, 3, 4, 5], [2, 3, 4, 6, 8, 9])
    assert whole.spans == [(0, 3), (3, 4), (4, 6)]
    assert whole.answers == [(1, 3), (3, 4), (4, 6)]
    answers = pack(examples, response=True)
    assert (answers.places, answers.targets) == ([1, 2, 3, 4, 5], [3, 4, 6, 8, 9])
    assert answers.spans == answers.answers == [(0, 2), (2, 3), (3, 5)]
    padded = pack(examples, response=False, padded_to=4)
    assert padded.rows == [[1, 2, 3], [5, 6], [7, 8, 9]]
    assert padded.targets == [2, 3, 4, 6, 0, 8, 9, 0]


def test_every_row_is_in_one_batch_with_rows_of_its_length() -> None:
    lengths = [9, 2, 5, 7, 1, 8, 3]
    groups = group(lengths, 3, like_mlx_lm=False)
    assert [[lengths[one] for one in rows] for rows in groups] == [[1, 2, 3], [5, 7, 8], [9]]
    assert group(lengths, 3, like_mlx_lm=True) == [[0, 1, 2], [3, 4, 5]]


def test_an_order_goes_on_where_it_was() -> None:
    order = order_of(5, 11)
    seen = [order.next() for _ in range(7)]
    assert sorted(seen[:5]) == list(range(5))
    other = order_of(5, 0)
    other.restore(order.state())
    assert [order.next() for _ in range(20)] == [other.next() for _ in range(20)]
