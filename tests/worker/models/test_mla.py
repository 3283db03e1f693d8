"""Latent attention: latents multiplied out and queries turned into their space give the same, for rows at any place."""

import math

import mlx.core as mx
import numpy as np
import pytest

from worker.cache.kv import FullKV
from worker.layers.batch import Batch
from worker.layers.linear import DenseLinear
from worker.layers.mla import LatentAttention, cheaper_from
from worker.layers.norm import RMSNorm
from worker.layers.rope import make_rope
from worker.layers.stacked import DenseStacked

DIM, HEADS, NOPE, TURNED, RANK, VALUE = 24, 3, 6, 4, 10, 5


def weight(*shape: int) -> mx.array:
    return mx.array(np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32) / 3)


def attention(expand_from: float) -> LatentAttention:
    made = LatentAttention(
        place=0,
        q=DenseLinear(weight(HEADS * (NOPE + TURNED), DIM)),
        kv_a=DenseLinear(weight(RANK + TURNED, DIM)),
        kv_norm=RMSNorm(weight(RANK), 1e-6),
        keys=DenseStacked(weight(HEADS, NOPE, RANK)),
        values=DenseStacked(weight(HEADS, VALUE, RANK)),
        o=DenseLinear(weight(DIM, HEADS * VALUE)),
        num_heads=HEADS,
        nope=NOPE,
        rank=RANK,
        value_dim=VALUE,
        scale=0.4,
        turned_factor=1.3,
    )
    made.expand_from = expand_from
    return made


def run(attention: LatentAttention, x: mx.array, steps: list[list[int]]) -> list[np.ndarray]:
    """Outputs of rows that all run along `x`; `steps`: tokens of each row in each step."""
    rope = make_rope({"rope_type": "default", "rope_theta": 1e4}, TURNED, 64, interleaved=True)
    caches = [[FullKV()] for _ in steps[0]]
    found: list[list[mx.array]] = [[] for _ in steps[0]]
    for lengths in steps:
        places = [row[0].offset for row in caches]
        parts = [x[at : at + n] for at, n in zip(places, lengths, strict=True)]
        batch = Batch(mx.zeros(sum(lengths), mx.int32), list(zip(caches, lengths, strict=True)))
        batch.rotate[""] = rope.over(batch, mx.float32)
        ends = np.cumsum(lengths)[:-1].tolist()
        for number, out in enumerate(mx.split(attention(mx.concatenate(parts), batch), ends)):
            found[number].append(out)
    return [np.array(mx.concatenate(each)) for each in found]


@pytest.mark.parametrize("steps", [[[12]], [[5], [7]], [[1]] * 12, [[7, 1], [5, 11]]])
def test_both_forms_give_the_same_however_tokens_are_cut(steps: list[list[int]]) -> None:
    x = weight(12, DIM) * 3
    whole = run(attention(0), x, [[12]])[0]
    for expand_from in (0, 3, math.inf):
        for out in run(attention(expand_from), x, steps):
            assert np.abs(out - whole).max() < 1e-5


def test_the_form_is_the_cheaper_one() -> None:
    assert cheaper_from(128, 512, 128) == pytest.approx(512 * 256 / 768)  # DeepSeek-V3
    assert cheaper_from(64, 64, 64) == math.inf  # the latents are no longer than keys and values
