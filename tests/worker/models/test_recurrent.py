"""The gated delta rule against its definition, token by token in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.cache.recurrent import RecurrentState
from worker.layers.batch import solo
from worker.layers.linear import DenseLinear
from worker.layers.recurrent import GatedDeltaNet, Heads, Inputs, convolved, delta_rule, unit_inverse

HEADS = Heads(keys=2, values=6, key_dim=16, value_dim=8)
Arrays = dict[str, np.ndarray]


def numbers(length: int, seed: int = 0, *, decay: float = 0.2, one_key: bool = False) -> Arrays:
    """Inputs of `length` tokens and a state before them; `one_key`: all tokens have the same."""
    stream = np.random.default_rng(seed)
    keys = stream.normal(size=(1 if one_key else length, HEADS.keys, HEADS.key_dim))
    keys = np.broadcast_to(keys / np.linalg.norm(keys, axis=-1, keepdims=True), (length, *keys.shape[1:]))
    return {
        "q": stream.normal(size=keys.shape) / HEADS.key_dim**0.5,
        "k": keys,
        "v": stream.normal(size=(length, HEADS.values, HEADS.value_dim)),
        "decay": -decay * stream.random((length, HEADS.values)),
        "beta": stream.random((length, HEADS.values)) if not one_key else np.ones((length, HEADS.values)),
        "state": stream.normal(size=(1, HEADS.values, HEADS.value_dim, HEADS.key_dim)),
    }


def by_definition(given: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """S = exp(decay) S; S += beta (v - S k) k^T; answer = S q; one head and token after another."""
    length = len(given["k"])
    answers = np.zeros((length, HEADS.values, HEADS.value_dim))
    state = given["state"].copy()
    for t in range(length):
        for head in range(HEADS.values):
            k, q = given["k"][t, head // HEADS.shared], given["q"][t, head // HEADS.shared]
            s = state[0, head] * np.exp(given["decay"][t, head])
            s += given["beta"][t, head] * np.outer(given["v"][t, head] - s @ k, k)
            state[0, head], answers[t, head] = s, s @ q
    return answers, state


def inputs_of(given: Arrays) -> Inputs:
    return Inputs(*(mx.array(given[name].astype(np.float32)) for name in ("q", "k", "v", "decay", "beta")))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 63, 64, 65, 128, 200])
def test_any_number_of_tokens_is_what_the_definition_says(length: int) -> None:
    given = numbers(length)
    answers, state = by_definition(given)
    found, after = delta_rule(
        inputs_of(given), (0, length), mx.array(given["state"].astype(np.float32)), HEADS
    )
    assert np.abs(np.array(found) - answers).max() < 2e-5
    assert np.abs(np.array(after) - state).max() < 2e-5


@pytest.mark.parametrize("decay", [0.0, 50.0])
def test_tokens_of_one_key_and_of_no_memory_stay_exact(decay: float) -> None:
    """A power series in place of the triangular system would have terms of 10^17 here."""
    given = numbers(150, decay=decay, one_key=True)
    answers, state = by_definition(given)
    found, after = delta_rule(inputs_of(given), (0, 150), mx.array(given["state"].astype(np.float32)), HEADS)
    assert np.abs(np.array(found) - answers).max() < 1e-4
    assert np.abs(np.array(after) - state).max() < 1e-4


def test_rows_of_one_token_each_are_stepped_together() -> None:
    many = [numbers(1, seed) for seed in range(5)]
    whole = {
        name: np.concatenate([one[name] for one in many])
        for name in ("q", "k", "v", "decay", "beta", "state")
    }
    found, after = delta_rule(inputs_of(whole), (0, 5), mx.array(whole["state"].astype(np.float32)), HEADS)
    for number, one in enumerate(many):
        answers, state = by_definition(one)
        assert np.abs(np.array(found)[number] - answers[0]).max() < 1e-5
        assert np.abs(np.array(after)[number] - state[0]).max() < 1e-5


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_ignores_what_is_on_and_above_the_diagonal(size: int) -> None:
    given = np.random.default_rng(size).normal(size=(3, size, size)) / size**0.5
    expected = np.linalg.inv(np.eye(size) + np.tril(given, -1))
    found = np.array(unit_inverse(mx.array(given.astype(np.float32))))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3], [5, 6]])
def test_a_convolution_in_pieces_is_one_convolution(cuts: list[int]) -> None:
    stream = np.random.default_rng(0)
    mixed, conv = stream.normal(size=(1, 9, 5)), stream.normal(size=(5, 4))
    padded = np.concatenate([np.zeros((1, 3, 5)), mixed], axis=1)
    expected = np.stack([(padded[0, t : t + 4] * conv.T).sum(axis=0) for t in range(9)])
    tail, parts = mx.zeros((1, 3, 5)), []
    for piece in np.split(mixed, cuts, axis=1):
        out, tail = convolved(tail, mx.array(piece.astype(np.float32)), mx.array(conv.astype(np.float32)))
        assert tail.shape == (1, 3, 5)
        parts.append(np.array(out)[0])
    assert np.abs(np.concatenate(parts) - expected).max() < 1e-5


def test_a_layer_holds_what_is_reckoned_for_a_chunk() -> None:
    """With 2 * 8 * 64 + 16 * 64 channels and 16 heads; see `parent.library.fit`."""
    heads, size, count = Heads(8, 16, 64, 64), 64, 512
    channels = 2 * 8 * 64 + 16 * 64

    def linear(out_dim: int, in_dim: int) -> DenseLinear:
        return DenseLinear(mx.full((out_dim, in_dim), 0.01))

    net = GatedDeltaNet(
        place=0,
        heads=heads,
        qkv=linear(channels, size),
        z=linear(1024, size),
        a=linear(16, size),
        b=linear(16, size),
        out=linear(size, 1024),
        conv=mx.ones((channels, 4)),
        rate=-mx.ones(16),
        dt_bias=mx.zeros(16),
        norm=mx.ones(64),
        eps=1e-6,
    )
    x, cache = mx.random.normal((count, size)), RecurrentState()
    mx.eval(net(x[:1], solo(mx.zeros(1, mx.int32), [cache.clone()])), x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(net(x, solo(mx.zeros(count, mx.int32), [cache])), cache.arrays())
    held = (mx.get_peak_memory() - before) / 4 / count
    reckoned = 7 * channels + 640 * 16 + 4 * size
    assert 0.6 * reckoned < held < reckoned


def test_a_compacted_state_lets_go_of_the_rows_it_was_stepped_with() -> None:
    def held() -> int:
        mx.synchronize()
        return mx.get_active_memory()

    before = held()
    together = mx.zeros((16, 1 << 16)) + 1
    mx.eval(together)
    cache: Any = RecurrentState()
    cache.advance(1, [together[3:4]])
    mx.eval(cache.arrays())
    del together
    assert held() - before >= 16 << 18
    cache.compact()
    mx.eval(cache.arrays())
    assert held() - before < 2 << 18
    assert np.array(cache.arrays()[0]).sum() == 1 << 16
