"""KV caches: what attention sees, trimming and cloning, against a plain list of tokens."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.cache.buffer import STEP
from worker.cache.kv import FullKV, LayerCache, RotatingKV

HEADS, DIM = 2, 4

KINDS: dict[str, Callable[[], LayerCache]] = {
    "full": FullKV,
    "window 1": lambda: RotatingKV(1),
    "window 3": lambda: RotatingKV(3),
    "window 7": lambda: RotatingKV(7),
}


def kv_of(begin: int, end: int, stream: int = 0) -> tuple[mx.array, mx.array]:
    """Keys whose every value is the token's number, values that are its negative."""
    numbers = mx.arange(begin + 1000 * stream, end + 1000 * stream).astype(mx.float32)
    keys = mx.broadcast_to(numbers[None, None, :, None], (1, HEADS, end - begin, DIM))
    return keys, -keys


def numbers_of(keys: mx.array) -> list[int]:
    return [int(one) for one in np.array(keys[0, 0, :, 0])]


def window_of(cache: LayerCache) -> int:
    return cache.window if isinstance(cache, RotatingKV) else 10**9


def visible(mask: mx.array | str | None, length: int, seen: int) -> list[list[bool]]:
    """A mask as rows of what each query sees."""
    if mask is None:
        return [[True] * seen for _ in range(length)]
    if isinstance(mask, str):
        assert mask == "causal"  # lower right aligned
        return [[key <= query + seen - length for key in range(seen)] for query in range(length)]
    rows: list[list[bool]] = np.array(mask).tolist()
    return rows


def feed(cache: LayerCache, tokens: list[int], length: int, stream: int = 0) -> None:
    """Append `length` tokens and check everything attention would see against the list of all tokens."""
    begin = cache.offset
    tokens += [1000 * stream + position for position in range(begin, begin + length)]
    mask = cache.mask(length)
    keys, values = cache.update(*kv_of(begin, begin + length, stream))
    held = numbers_of(keys)
    assert numbers_of(-values) == held
    assert cache.offset == len(tokens)
    for row, sees in enumerate(visible(mask, length, len(held))):
        position = begin + row
        expected = tokens[max(0, position - window_of(cache) + 1) : position + 1]
        assert [token for token, seen in zip(held, sees, strict=True) if seen] == expected


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_every_query_sees_exactly_its_window(kind: str, lengths: list[int]) -> None:
    cache, tokens = KINDS[kind](), []
    for length in lengths:
        feed(cache, tokens, length)


@pytest.mark.parametrize("kind", KINDS)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("feed"), st.integers(1, 9)),
            st.tuples(st.just("trim"), st.integers(0, 9)),
            st.tuples(st.just("clone"), st.just(0)),
            st.tuples(st.just("swap"), st.just(0)),
        ),
        max_size=14,
    )
)
@settings(deadline=None, max_examples=60)
def test_trimmed_and_cloned_caches_go_their_own_ways(kind: str, moves: list[tuple[str, int]]) -> None:
    cache, tokens = KINDS[kind](), []
    other: LayerCache | None = None
    other_tokens: list[int] = []
    stream = 0
    for move, count in moves:
        if move == "feed":
            feed(cache, tokens, count, stream)
        elif move == "trim":
            if cache.can_trim(count):
                cache.trim(count)
                del tokens[len(tokens) - count :]
            else:
                with pytest.raises(ValueError, match="cannot trim"):
                    cache.trim(count)
        elif move == "clone":
            other, other_tokens = cache.clone(), list(tokens)
            stream += 1  # what either side writes from now on differs
        elif other is not None:
            cache, other, tokens, other_tokens = other, cache, other_tokens, tokens
            stream += 1
    feed(cache, tokens, 3, stream)
    if other is not None:
        feed(other, other_tokens, 3, stream + 1)


def test_a_full_cache_can_always_be_trimmed_and_a_window_only_by_what_it_still_holds() -> None:
    full, rotating = FullKV(), RotatingKV(4)
    for cache in (full, rotating):
        for begin in range(0, 2 * STEP, 64):
            cache.update(*kv_of(begin, begin + 64))
    assert full.can_trim(2 * STEP)
    assert not full.can_trim(2 * STEP + 1)
    assert not full.can_trim(-1)
    assert not rotating.can_trim(2 * STEP - 10)


@pytest.mark.parametrize("window", [1, 4, 300])
def test_a_window_holds_no_more_than_it_needs_and_a_step(window: int) -> None:
    cache = RotatingKV(window)
    one_token = 2 * HEADS * DIM * 4
    for begin in range(0, 3000, 50):
        cache.update(*kv_of(begin, begin + 50))
        mx.eval(cache.arrays())
    assert cache.nbytes <= (window - 1 + 50 + STEP) * one_token


def test_a_full_cache_grows_in_steps() -> None:
    cache, sizes = FullKV(), set()
    for begin in range(2 * STEP + 1):
        cache.update(*kv_of(begin, begin + 1))
        mx.eval(cache.arrays())
        sizes.add(cache.nbytes)
    one_token = 2 * HEADS * DIM * 4
    assert sizes == {STEP * one_token, 2 * STEP * one_token, 3 * STEP * one_token}


def test_an_empty_cache_holds_nothing() -> None:
    for make in KINDS.values():
        cache = make()
        assert (cache.offset, cache.nbytes, cache.arrays(), cache.can_trim(0)) == (0, 0, [], True)
    with pytest.raises(ValueError, match="window"):
        RotatingKV(0)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 40)
)
def test_a_compacted_cache_is_smaller_and_goes_on_as_before(kind: str, pieces: list[int], more: int) -> None:
    cache = KINDS[kind]()
    tokens: list[int] = []
    for length in pieces:
        feed(cache, tokens, length)
    before = cache.nbytes
    cache.compact()
    assert cache.nbytes <= before
    assert cache.nbytes <= 2 * 4 * HEADS * DIM * (len(tokens) + len(tokens) // 9 + 1)
    feed(cache, tokens, more)
    feed(cache, tokens, 1)
