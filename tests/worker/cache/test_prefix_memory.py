"""What the prefix cache counts is what it keeps in memory, also of rows that were left before their first step."""

import gc

import mlx.core as mx
import pytest

from shared.kv_layout import LayerKv
from worker.cache.layers import make_caches
from worker.cache.prefix import PrefixCache, checkpoint_of

SLACK = 64 << 10  # bytes: a small array may stay in a buffer that is little greater
LAYOUTS = {
    "full": [LayerKv(2, 64)] * 2,
    "one head": [LayerKv(1, 64)] * 2,
    "quantized": [LayerKv(2, 64, bits=8), LayerKv(2, 64, bits=4, plain=128)],
    "window": [LayerKv(2, 64, window=900)] * 2,
    "mixed": [LayerKv(2, 64), LayerKv(2, 64, window=900), LayerKv(0, 0, state=8, state32=8)],
}
IDS = list(range(4000))


def run(layout: list[LayerKv], caches: list, count: int, rows: int = 1) -> None:
    """So many more tokens. The states of a recurrent layer are parts of those of all rows of a step."""
    for layer, cache in zip(layout, caches, strict=True):
        if layer.is_recurrent:
            together = mx.zeros((rows, 1 << 14)) + 1
            cache.advance(count, [together[:1], together[:1] * 2])
        else:
            heads = layer.num_kv_heads
            keys = mx.zeros((1, heads, count, 64)) + 1
            cache.update(keys, -keys)
    mx.eval([array for cache in caches for array in cache.arrays()])


def held() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def kept(prefix: PrefixCache, layout: list[LayerKv], count: int, *marks: int, rows: int = 1) -> None:
    """A row of so many tokens that has ended."""
    caches, points, done = make_caches(layout, count), {}, 0
    for mark in (*marks, count):
        run(layout, caches, mark - done, rows)
        done = mark
        if mark < count:
            points[mark] = checkpoint_of(caches)
    prefix.put(IDS[:count], caches, points)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_keeps_no_more_than_is_counted_once_its_parent_is_gone(layout, steps):
    """Left before its first step, or after it: its checkpoints are of the parent in both cases."""
    layers = LAYOUTS[layout]
    before = held()
    prefix = PrefixCache(1 << 30, lambda length: 0)
    kept(prefix, layers, 4000, 64)
    assert held() - before <= prefix.nbytes + SLACK
    branch, lookup = prefix.take([*IDS[:64], 9, 9])
    assert branch is not None
    assert lookup.reused == 64
    prefix.clear()
    if steps:
        run(layers, branch.caches, steps)
    prefix.put([*IDS[:64], *[9] * steps], branch.caches, branch.checkpoints)
    del branch
    assert len(prefix) == 1
    assert held() - before <= prefix.nbytes + SLACK


def test_checkpoints_let_go_of_the_rows_that_were_stepped_with_theirs():
    layers = LAYOUTS["mixed"]
    before = held()
    prefix = PrefixCache(1 << 30, lambda length: 0)
    kept(prefix, layers, 200, 64, rows=200)
    assert held() - before <= prefix.nbytes + SLACK


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_that_was_left_at_once_takes_nothing_beside_its_parent(layout):
    layers = LAYOUTS[layout]
    prefix = PrefixCache(1 << 30, lambda length: 0)
    kept(prefix, layers, 64)
    kept(prefix, layers, 4000, 64)
    count = prefix.nbytes
    assert len(prefix) == 1
    branch, _ = prefix.take([*IDS[:64], 9, 9])
    assert branch is not None
    prefix.put(IDS[:64], branch.caches, branch.checkpoints)
    assert (prefix.nbytes, len(prefix)) == (count, 1)
