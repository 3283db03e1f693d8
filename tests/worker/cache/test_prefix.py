"""The prefix cache: longest usable beginning, branches, bytes cap, least recently used first."""

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.model import CountingCache
from worker.cache.prefix import MIN_TOKENS, PrefixCache, common_length


def cache(max_bytes: int = 1 << 20, same=lambda length, other: True) -> PrefixCache:
    return PrefixCache(max_bytes, same)


def put(prefix: PrefixCache, ids: list[int]) -> None:
    prefix.put(list(ids), [CountingCache(ids)])


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_length_is_the_first_difference(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length(a, b) == expected


def test_one_token_of_the_prompt_is_always_left_to_run():
    prefix = cache()
    ids = list(range(40))
    put(prefix, ids)
    caches, count = prefix.take(ids)
    assert count == 39
    assert caches[0].ids == ids[:39]


def test_taking_does_not_consume_and_writes_do_not_show_in_the_other_branch():
    prefix = cache()
    ids = list(range(40))
    put(prefix, ids)
    first, _ = prefix.take([*ids[:30], 99, 98])
    first[0].ids.append(77)
    second, count = prefix.take([*ids, 1])
    assert count == 40
    assert second[0].ids == ids


def test_short_prefixes_are_run_again():
    prefix = cache()
    put(prefix, list(range(100)))
    assert prefix.take([*range(MIN_TOKENS - 1), 500, 501]) == (None, 0)


def test_a_longer_entry_takes_the_place_of_its_beginning():
    prefix = cache()
    put(prefix, list(range(20)))
    put(prefix, list(range(40)))
    assert len(prefix) == 1
    assert prefix.nbytes == 8 * 40


def test_entries_beyond_the_cap_go_least_recently_used_first():
    prefix = cache(max_bytes=8 * 100)
    for start in (0, 1000, 2000):
        put(prefix, list(range(start, start + 40)))
        prefix.take([*range(40), 7])  # the first one stays in use
    assert prefix.nbytes <= 8 * 100
    assert prefix.take([*range(40), 7])[1] == 40
    assert prefix.take([*range(1000, 1040), 7]) == (None, 0)


def test_an_entry_larger_than_the_cap_is_not_kept():
    prefix = cache(max_bytes=8)
    put(prefix, list(range(40)))
    assert len(prefix) == 0


def test_keys_rotated_for_another_length_are_not_reused():
    prefix = cache(same=lambda length, other: (length > 50) == (other > 50))
    put(prefix, list(range(40)))
    assert prefix.take([*range(40), *range(200, 230)]) == (None, 0)
    assert prefix.take([*range(40), 7])[1] == 40


@given(st.lists(st.lists(st.integers(0, 1), min_size=17, max_size=60), max_size=12), st.integers(0, 3000))
def test_bytes_are_counted_and_capped_and_hits_are_true(prompts, cap):
    prefix = cache(max_bytes=cap)
    for ids in prompts:
        caches, count = prefix.take(ids)
        if caches is not None:
            assert caches[0].ids == ids[:count]
            assert MIN_TOKENS <= count < len(ids)
        put(prefix, ids)
        assert prefix.nbytes == sum(e.nbytes for e in prefix._entries) <= cap
