"""Rotations: kernel and table agree with the textbook formula, for parts of heads and for rows of a batch."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.layers.batch import Batch
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
    "proportional": {},
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


def flat(x: np.ndarray) -> np.ndarray:
    """`[1, H, L, D]` as `[L, H, D]`."""
    return x[0].transpose(1, 0, 2)


def rotation_of(kind: str, partial: float, length: int) -> Rotation:
    params = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": partial, **KINDS[kind]}
    if kind == "longrope":
        count = int(DIM * partial) // 2
        params |= {key: KINDS[kind][key][:count] for key in ("short_factor", "long_factor")}
    return make_rope(params, DIM, 32).at(length)


def batch(*rows: tuple[int, int]) -> Batch:
    """Rows of (offset, length)."""
    parts = [([SimpleNamespace(offset=offset, planned=0)], length) for offset, length in rows]
    return Batch(mx.zeros(sum(length for _, length in rows), mx.int32), parts)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 40])
def test_kernel_and_table_turn_pairs_as_the_textbook_says(offset: int, kind: str, partial: float) -> None:
    x = np.random.RandomState(3).standard_normal((1, 2, 5, DIM)).astype(np.float32)
    rotation = rotation_of(kind, partial, offset + 5)
    expected = textbook(x, np.arange(offset, offset + 5)[None], rotation)
    by_kernel = np.array(rotation.kernel(mx.array(x), offset))
    positions = mx.arange(offset, offset + 5, dtype=mx.float32)
    by_table = np.array(rotation.by_table(rotation.angles(positions), mx.float32)(mx.array(flat(x))))
    assert np.abs(by_kernel - expected).max() < 2e-5
    assert np.abs(by_table - flat(expected)).max() < 2e-5


@pytest.mark.parametrize("kind", ["default", "yarn", "proportional"])
def test_neighbours_are_paired_where_a_family_does_so(kind: str) -> None:
    """The kernel leaves pairs where they were, the table sorts them: products of two heads are the same."""
    params = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    halves, neighbours = (make_rope(params, DIM, 32, interleaved=each).at(9) for each in (False, True))
    x = np.random.RandomState(5).standard_normal((1, 2, 4, DIM)).astype(np.float32)
    sorted_x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    expected = textbook(sorted_x, np.arange(7, 11)[None], halves)
    by_kernel = np.array(neighbours.kernel(mx.array(x), 7))
    angles = neighbours.angles(mx.arange(7, 11, dtype=mx.float32))
    by_table = np.array(neighbours.by_table(angles, mx.float32)(mx.array(flat(x))))
    assert (
        np.abs(np.concatenate([by_kernel[..., 0::2], by_kernel[..., 1::2]], axis=-1) - expected).max() < 2e-5
    )
    assert np.abs(by_table - flat(expected)).max() < 2e-5


@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic", "longrope"])
def test_rows_of_a_batch_stand_at_different_places(kind: str) -> None:
    params = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    rope = make_rope(params, DIM, 32)
    x = np.random.RandomState(4).standard_normal((10, 2, DIM)).astype(np.float32)
    places = [(0, 4), (7, 1), (31, 5)]
    expected, begin = [], 0
    for offset, length in places:
        heads = x[begin : begin + length].transpose(1, 0, 2)[None]
        positions = np.arange(offset, offset + length)[None]
        expected.append(flat(textbook(heads, positions, rope.at(offset + length))))
        begin += length
    by_table = np.array(rope.over(batch(*places), mx.float32)(mx.array(x)))
    by_kernel = np.array(rope._row_by_row(batch(*places).rows)(mx.array(x)))
    assert np.abs(by_table - np.concatenate(expected)).max() < 2e-5
    assert np.abs(by_kernel - np.concatenate(expected)).max() < 2e-5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_dtype_stays(dtype: mx.Dtype) -> None:
    rope = make_rope({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, DIM, 32)
    assert rope.over(batch((3, 2)), dtype)(mx.ones((2, 1, DIM), dtype)).dtype == dtype


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
    assert (rope.regime(length) == rope.regime(other)) == same
