"""Routers and experts against the same written out expert by expert, in double precision."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.layers.activations import silu
from worker.layers.linear import DenseLinear
from worker.layers.moe import (
    BLOCK,
    MANY,
    Experts,
    SigmoidRouter,
    SoftmaxRouter,
    TopSoftmaxRouter,
    clipped_swiglu,
    gated,
    top_k,
)
from worker.layers.stacked import DenseStacked, Turned

EXPERTS, DIM, WIDE, K = 8, 16, 12, 3


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def gate() -> DenseLinear:
    return DenseLinear(mx.array(draw(EXPERTS, DIM)))


def routing(router: Any, x: np.ndarray) -> list[dict[int, float]]:
    """What each token's experts weigh."""
    indices, weights = (np.array(each) for each in router(mx.array(x)))
    assert weights.dtype == np.float32
    found = [dict(zip(i.tolist(), w.tolist(), strict=True)) for i, w in zip(indices, weights, strict=True)]
    assert all(len(each) == K for each in found)
    return found


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def same(found: list[dict[int, float]], expected: list[dict[int, float]]) -> bool:
    return all(
        one.keys() == other.keys() and all(abs(one[key] - other[key]) < 1e-5 for key in one)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("normalise", [False, True])
def test_softmax_over_all_then_the_greatest(normalise: bool) -> None:
    x, expected = draw(20, DIM), []
    for logits in x.astype(np.float64) @ draw(EXPERTS, DIM).T:
        shares = softmax(logits)
        best = np.argsort(-shares)[:K]
        expected.append({int(e): shares[e] / (shares[best].sum() if normalise else 1) for e in best})
    assert same(routing(SoftmaxRouter(gate(), K, normalise=normalise), x), expected)


def test_the_greatest_then_softmax_over_these() -> None:
    x, expected = draw(20, DIM), []
    for logits in x.astype(np.float64) @ draw(EXPERTS, DIM).T:
        best = np.argsort(-logits)[:K]
        expected.append(dict(zip(best.tolist(), softmax(logits[best]), strict=True)))
    assert same(routing(TopSoftmaxRouter(gate(), K), x), expected)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("normalise", [False, True])
def test_sigmoids_choose_with_their_correction_and_weigh_without_it(
    normalise: bool, groups: int, kept: int
) -> None:
    x, expected, correction = draw(40, DIM), [], draw(EXPERTS)
    size = EXPERTS // groups
    for logits in x.astype(np.float64) @ draw(EXPERTS, DIM).T:
        values = 1 / (1 + np.exp(-logits))
        scores = values + correction
        worth = np.sort(scores.reshape(groups, size), axis=-1)[:, -2:].sum(axis=-1)
        allowed = [e for group in np.argsort(-worth)[:kept] for e in range(group * size, (group + 1) * size)]
        best = sorted(allowed, key=lambda e: -scores[e])[:K]
        total = values[best].sum() if normalise else 1
        expected.append({e: 2.5 * values[e] / total for e in best})
    router = SigmoidRouter(
        gate(),
        mx.array(correction),
        K,
        groups=groups,
        kept_groups=kept,
        normalise=normalise,
        scale=2.5,
    )
    assert same(routing(router, x), expected)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("count", [1, MANY // K, MANY // K + 1, 100])
@pytest.mark.parametrize("combine", ["silu", "clipped"])
def test_experts_answer_in_any_number_what_each_would_alone(count: int, combine: str, blocks: bool) -> None:
    shapes = {"gate": (EXPERTS, WIDE, DIM), "up": (EXPERTS, WIDE, DIM), "down": (EXPERTS, DIM, WIDE)}
    weight = {name: draw(*shape, seed=ord(name[0])) for name, shape in shapes.items()}
    bias = {name: draw(*shape[:2], seed=ord(name[0])) for name, shape in shapes.items()}
    act = gated(silu) if combine == "silu" else clipped_swiglu(1.7, 1.5)
    experts = Experts(
        *(DenseStacked(mx.array(weight[name]), mx.array(bias[name])) for name in ("gate", "up", "down")), act
    )
    experts.count = EXPERTS if blocks else 0
    x, router = draw(count, DIM), TopSoftmaxRouter(gate(), K)
    expected = np.zeros((count, DIM))
    for token, chosen in enumerate(routing(router, x)):
        for e, share in chosen.items():
            one, other = (weight[n][e].astype(np.float64) @ x[token] + bias[n][e] for n in ("gate", "up"))
            if combine == "silu":
                inner = one / (1 + np.exp(-one)) * other
            else:
                one, other = np.minimum(one, 1.5), np.clip(other, -1.5, 1.5)
                inner = (other + 1) * one / (1 + np.exp(-1.7 * one))
            expected[token] += share * (weight["down"][e] @ inner + bias["down"][e])
    found = np.array(experts(mx.array(x), router(mx.array(x))))
    assert found.shape == (count, DIM)
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("chosen", [[0], [EXPERTS - 1], [3], [0, 5], list(range(EXPERTS))])
def test_blocks_of_tokens_answer_whoever_is_chosen(chosen: list[int]) -> None:
    """Experts that nobody chose, one that all chose, and blocks filled to the last token."""
    stack = DenseStacked(mx.array(draw(EXPERTS, DIM, DIM)))
    experts = Experts(stack, stack, stack, lambda one, other: one)
    experts.count = EXPERTS
    for count in (BLOCK, BLOCK + 1, 7 * BLOCK, 100):
        x = mx.array(draw(count, DIM))
        indices = mx.array([[chosen[token % len(chosen)]] for token in range(count)], mx.uint32)
        expected = [
            np.array(stack.weight[i] @ (stack.weight[i] @ one))
            for i, one in zip(indices[:, 0].tolist(), x, strict=True)
        ]
        assert np.abs(np.array(experts._by_blocks(x, indices)) - np.array(expected)).max() < 1e-4


def test_all_experts_are_the_greatest_of_as_many() -> None:
    assert np.array(top_k(mx.array(draw(3, 4)), 4)).tolist() == [[0, 1, 2, 3]] * 3


def test_a_turned_stack_does_the_reverse() -> None:
    stack = DenseStacked(mx.array(draw(2, 5, 3)))
    x, y = mx.array(draw(2, 4, 3)), mx.array(draw(2, 4, 5))
    assert mx.array_equal(Turned(stack).each(y), stack.back(y))
    assert mx.array_equal(Turned(stack).back(x), stack.each(x))
