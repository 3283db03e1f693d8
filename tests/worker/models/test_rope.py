"""Rotations: kernel and table agree with the textbook formula, for parts of heads and for rows of a batch."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.layers.rope import Rotation, make_rope

DIM = 16
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.1 * i for i in range(8)],
    },
}


def textbook(x: np.ndarray, positions: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Pairs (i, i + dims / 2) turned by position / freq[i], in double precision. `x` [B, H, L, D]."""
    dims, half = rotation.dims, rotation.dims // 2
    if rotation.freqs is None:
        assert rotation.base is not None
        freqs = rotation.base ** (np.arange(half) / half)
    else:
        freqs = np.array(rotation.freqs, np.float64)
    angles = (positions * rotation.scale)[:, None, :, None] / freqs
    low, high = x[..., :half].astype(np.float64), x[..., half:dims].astype(np.float64)
    turned = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return np.concatenate([*(part * rotation.factor for part in turned), x[..., dims:]], axis=-1)


def rotation_of(kind: str, partial: float, length: int) -> Rotation:
    params = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": partial, **KINDS[kind]}
    if kind == "longrope":
        count = int(DIM * partial) // 2
        params |= {key: KINDS[kind][key][:count] for key in ("short_factor", "long_factor")}
    return make_rope(params, DIM, 32).at(length)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["_by_kernel", "_by_table"])
def test_both_ways_turn_pairs_as_the_textbook_says(way: str, kind: str, partial: float) -> None:
    x = np.random.RandomState(3).standard_normal((1, 2, 5, DIM)).astype(np.float32)
    for offset in (0, 40):
        rotation = rotation_of(kind, partial, offset + 5)
        rotate = (
            rotation._by_kernel(offset) if way == "_by_kernel" else rotation._by_table(offset, 5, mx.float32)
        )
        expected = textbook(x, np.arange(offset, offset + 5)[None], rotation)
        assert np.abs(np.array(rotate(mx.array(x))) - expected).max() < 2e-5


def test_rows_of_a_batch_may_stand_at_different_places() -> None:
    x = np.random.RandomState(4).standard_normal((3, 2, 4, DIM)).astype(np.float32)
    offsets = np.array([0, 7, 31])
    rotation = rotation_of("yarn", 1.0, 40)
    found = np.array(rotation.over(mx.array(offsets, mx.int32), 4, mx.float32)(mx.array(x)))
    expected = textbook(x, offsets[:, None] + np.arange(4), rotation)
    assert np.abs(found - expected).max() < 2e-5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_dtype_stays(dtype: mx.Dtype) -> None:
    rotate = rotation_of("default", 0.5, 8).over(3, 2, dtype)
    assert rotate(mx.ones((1, 1, 2, DIM), dtype)).dtype == dtype


def test_attention_factors_go_into_the_softmax_scale_for_whole_heads_only() -> None:
    params = {"rope_type": "yarn", "rope_theta": 1e4, **KINDS["yarn"], "attention_factor": 1.5}
    whole = make_rope(params, DIM, 32)
    part = make_rope({**params, "partial_rotary_factor": 0.5}, DIM, 32)
    assert (whole.softmax_factor, whole.at(1).factor) == (2.25, 1.0)
    assert (part.softmax_factor, part.at(1).factor) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("kind", "length", "other", "same"),
    [
        ("default", 1, 10**6, True),
        ("yarn", 1, 10**6, True),
        ("dynamic", 8, 32, True),
        ("dynamic", 8, 33, False),
        ("dynamic", 40, 41, False),
        ("longrope", 8, 32, True),
        ("longrope", 32, 33, False),
        ("longrope", 33, 10**6, True),
    ],
)
def test_keys_serve_another_length_where_the_rotation_is_the_same(
    kind: str, length: int, other: int, same: bool
) -> None:
    rope = make_rope({"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}, DIM, 32)
    assert rope.same(length, other) == same
