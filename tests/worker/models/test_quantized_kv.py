"""Quantized KV caches: what attention makes of them, whatever the pieces; what they hold; what cannot be."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Refused
from shared.kv_layout import KV_STEP, LayerKv, kept_as, kv_bytes, kv_room, quantized
from tests.oracles import checkpoints
from worker.cache.buffer import QuantizedForm
from worker.cache.kv import FullKV, LayerCache, RotatingKV, SplitKV
from worker.cache.layers import empty_like, make_caches
from worker.layers.batch import Batch, solo
from worker.layers.packed import FEW, Joined, Packed, packed_attention
from worker.models import load_model

HEADS, KV_HEADS, DIM = 4, 2, 64


def plain_of(held: mx.array | Packed | Joined) -> np.ndarray:
    return np.array(held if isinstance(held, mx.array) else held.plain())


def rounded(x: mx.array, bits: int) -> mx.array:
    """What is left of `x` after it was kept in so many bits."""
    return mx.dequantize(*mx.quantize(x, group_size=64, bits=bits), group_size=64, bits=bits)


def tokens(begin: int, end: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the tokens of these numbers, the same however they are cut."""
    keys = mx.random.normal((1, KV_HEADS, 400, DIM), key=mx.random.key(1))[..., begin:end, :]
    values = mx.random.normal((1, KV_HEADS, 400, DIM), key=mx.random.key(2))[..., begin:end, :]
    return keys, values


def cache_of(plain: int, bits: int, window: int = 0) -> LayerCache:
    return make_caches([LayerKv(KV_HEADS, DIM, window, bits=bits, plain=plain)])[0]


@pytest.mark.parametrize("bits", [4, 8])
@given(plain=st.integers(0, 40), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
def test_a_token_is_kept_by_its_position_alone(bits: int, plain: int, lengths: list[int]) -> None:
    cache = cache_of(plain, bits)
    for length in lengths:
        keys, values = cache.update(*tokens(cache.offset, cache.offset + length))
    count = sum(lengths)
    for held, given_ in zip((keys, values), tokens(0, count), strict=True):
        expected = mx.concatenate([given_[..., :plain, :], rounded(given_, bits)[..., plain:, :]], axis=2)
        assert np.array_equal(plain_of(held), np.array(expected))
        assert cache.offset == count


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("plain", [0, 5])
@pytest.mark.parametrize("length", [1, 3, FEW, FEW + 5])
def test_attention_is_that_over_the_values_multiplied_out(
    length: int, plain: int, sinks: bool, window: int
) -> None:
    cache = cache_of(0 if window else plain, 8, window)
    cache.update(*tokens(0, 50))
    mask = cache.mask(length)
    keys, values = cache.update(*tokens(50, 50 + length))
    queries = mx.random.normal((1, HEADS, length, DIM), key=mx.random.key(3))
    extra = mx.array([0.5, -1.0, 2.0, 0.0]) if sinks else None
    found = packed_attention(queries, keys, values, DIM**-0.5, mask, extra)
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys.plain(), values.plain(), scale=DIM**-0.5, mask=mask, sinks=extra
    )
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


@pytest.mark.parametrize(
    "make",
    [
        lambda: FullKV(QuantizedForm(4, 64)),
        lambda: RotatingKV(20, QuantizedForm(8, 64)),
        lambda: SplitKV(30, QuantizedForm(8, 64)),
        lambda: SplitKV(200, QuantizedForm(8, 64)),
    ],
)
def test_a_cache_trims_clones_and_comes_back_from_its_arrays(make) -> None:
    cache = make()
    for begin in range(0, 100, 25):
        cache.update(*tokens(begin, begin + 25))
    cache.trim(5)
    clone = cache.clone()
    clone.cut()
    shapes = [list(array.shape) for array in clone.arrays()]
    back = empty_like(clone.state())
    assert back.holds(shapes)
    assert not back.holds(shapes[:-1])
    back.fill(clone.arrays())
    other = cache.clone()
    other.update(*tokens(200, 230))
    wanted = cache.update(*tokens(95, 98))
    found = back.update(*tokens(95, 98))
    assert back.offset == cache.offset == 98
    for one, two in zip(found, wanted, strict=True):
        assert np.array_equal(plain_of(one), plain_of(two))


@pytest.mark.parametrize("name", ["llama_tied", "mistral_window"])
@pytest.mark.parametrize("scheme", ["kv8", "kv4"])
def test_a_model_with_a_quantized_cache_says_nearly_the_same_however_it_is_cut(
    name: str, scheme: str, tmp_path: Path
) -> None:
    folder = wide(name, tmp_path)
    ids = mx.array(checkpoints.reference(name)["input_ids"])
    exact, loaded = load_model(folder).model, load_model(folder, kv_cache=scheme).model
    plain = np.array(exact.head(exact(solo(ids, exact.make_caches()))))
    whole = np.array(loaded.head(loaded(solo(ids, loaded.make_caches()))))
    caches = loaded.make_caches()
    steps = [loaded.head(loaded(solo(ids[n : n + 1], caches))) for n in range(len(ids))]
    # sums in another order may put a value on the other side of a step of its quantization, no more
    assert np.abs(np.array(mx.concatenate(steps)) - whole).max() < 1e-2
    both = Batch(mx.concatenate([ids, ids[::-1]]), [(loaded.make_caches(), len(ids)) for _ in range(2)])
    assert np.abs(np.array(loaded.head(loaded(both)))[: len(ids)] - whole).max() < 1e-2
    if name == "llama_tied":
        assert 0 < np.abs(whole - plain).max() < (0.3 if scheme == "kv8" else 2.0)
    else:  # every layer has a window: nothing is quantized
        assert np.abs(whole - plain).max() < 1e-5


def wide(name: str, folder: Path) -> Path:
    """A case whose heads are wide enough to be quantized."""
    config, seed = checkpoints.case(name)
    return checkpoints.write_model({**config, "head_dim": 64}, seed, folder)


def test_what_is_held_is_what_the_arithmetic_says(tmp_path: Path) -> None:
    folder = wide("llama_tied", tmp_path)
    layer = {"layer_idx": 1, "bits": 8, "group_size": 32}
    (folder / "kv_config.json").write_text(json.dumps([layer]))
    for scheme, plain, tokens_ in [("auto", 0, 256), ("kv4", 300, 600), ("kv8", 0, 300), ("full", 9, 10)]:
        loaded = load_model(folder, kv_cache=scheme, kv_start=plain)
        caches = loaded.model.make_caches()
        for begin in range(0, tokens_, 100):
            loaded.model(solo(mx.ones(min(100, tokens_ - begin), mx.int32), caches))
        held = sum(cache.nbytes for cache in caches)
        assert held == kv_room(loaded.model.layout, tokens_, 100, 4)
        if scheme == "auto":
            assert [each.bits for each in loaded.model.layout] == [0, 8, 0]
            assert held == kv_bytes(loaded.model.layout, KV_STEP, 4)
            assert loaded.model.layout == kept_as(loaded.checkpoint.config, "config")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layer_idx": 3, "bits": 8}, "layer_idx 3 is not one of the 3 caches"),
        ({"layer_idx": "x", "bits": 8}, "layer_idx 'x'"),
        ({"layer_idx": 0, "bits": 7}, "7 bits"),
        ({"layer_idx": 0, "bits": 4, "group_size": 48}, "groups of 48"),
        ({"layer_idx": 0, "bits": 4, "group_size": 128}, "do not divide into groups of 128"),
    ],
)
def test_a_wrong_kv_config_is_named(entry: dict, message: str, tmp_path: Path) -> None:
    folder = wide("llama_tied", tmp_path)
    (folder / "kv_config.json").write_text(json.dumps([entry]))
    with pytest.raises(Refused, match=r"kv_config\.json") as caught:
        load_model(folder)
    assert message in str(caught.value)


def test_a_scheme_that_the_heads_do_not_allow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="heads of 16") as caught:
        load_model(checkpoints.write_case("llama_tied", tmp_path), kv_cache="kv8")
    assert "choose full" in str(caught.value)
    with pytest.raises(ValueError, match="kv5"):
        quantized([], "kv5")
