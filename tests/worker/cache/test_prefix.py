"""The prefix cache: longest usable beginning, branches and checkpoints, bytes cap, least recently used first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.model import CountingCache
from worker.cache.chain import BLOCK
from worker.cache.prefix import (
    MIN_TOKENS,
    MOST_CHECKPOINTS,
    PrefixCache,
    asked_of_disk,
    checkpoint_of,
    common_length,
    marks_of,
)


class StuckCache(CountingCache):
    """A cache that cannot go back, as that of a recurrent layer."""

    goes_back = False

    def can_trim(self, count: int) -> bool:
        return count == 0

    def clone(self) -> "StuckCache":
        return StuckCache(self.ids)


def cache(max_bytes: int = 1 << 20, regime=lambda length: 0) -> PrefixCache:
    return PrefixCache(max_bytes, regime)


def put(prefix: PrefixCache, ids: list[int]) -> None:
    prefix.put(list(ids), [CountingCache(ids)])


def put_mixed(prefix: PrefixCache, ids: list[int], *marks: int) -> None:
    """An entry of a model with both kinds of layers, and checkpoints after so many tokens."""
    points = {at: checkpoint_of([CountingCache(ids[:at]), StuckCache(ids[:at])]) for at in marks}
    prefix.put(list(ids), [CountingCache(ids), StuckCache(ids)], points)


def take(prefix: PrefixCache, prompt: list[int]) -> tuple[list | None, int]:
    branch, lookup = prefix.take(prompt)
    return (branch.caches if branch else None), lookup.reused


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_length_is_the_first_difference(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length(a, b) == expected


def test_one_token_of_the_prompt_is_always_left_to_run():
    prefix = cache()
    ids = list(range(40))
    put(prefix, ids)
    caches, count = take(prefix, ids)
    assert count == 39
    assert caches[0].ids == ids[:39]


def test_taking_does_not_consume_and_writes_do_not_show_in_the_other_branch():
    prefix = cache()
    ids = list(range(40))
    put(prefix, ids)
    first, _ = take(prefix, [*ids[:30], 99, 98])
    first[0].ids.append(77)
    second, count = take(prefix, [*ids, 1])
    assert count == 40
    assert second[0].ids == ids


def test_short_prefixes_are_run_again():
    prefix = cache()
    put(prefix, list(range(100)))
    assert take(prefix, [*range(MIN_TOKENS - 1), 500, 501]) == (None, 0)


def test_a_longer_entry_takes_the_place_of_its_beginning():
    prefix = cache()
    put(prefix, list(range(20)))
    put(prefix, list(range(40)))
    assert len(prefix) == 1
    assert prefix.nbytes == 8 * 40


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        ([*range(100), 7], 100),  # at its end
        ([*range(99)], 64),  # cannot go back by one token
        ([*range(80), 7], 64),
        ([*range(64), 7], 64),
        ([*range(63), 7], 32),
        ([*range(31), 7], 0),
    ],
)
def test_layers_that_cannot_go_back_are_taken_up_at_checkpoints(prompt, reused):
    prefix = cache()
    put_mixed(prefix, list(range(100)), 32, 64)
    caches, count = take(prefix, prompt)
    assert count == reused
    if reused:
        assert [each.ids for each in caches] == [prompt[:reused]] * 2
        assert type(caches[1]) is StuckCache


def test_what_goes_on_from_a_branch_inherits_the_way_there():
    prefix = cache()
    put_mixed(prefix, list(range(100)), 32, 64)
    branch, _ = prefix.take([*range(100), 7])
    assert sorted(branch.checkpoints) == [32, 64, 100]
    branch, _ = prefix.take([*range(70), 7])
    assert sorted(branch.checkpoints) == [32, 64]
    assert branch.checkpoints[64][0] is None  # a layer that keeps every token needs none


def test_an_entry_stays_while_a_longer_one_cannot_be_taken_up_where_it_could():
    prefix = cache()
    put_mixed(prefix, list(range(50)), 20)
    put_mixed(prefix, list(range(100)), 20)
    assert len(prefix) == 2
    put_mixed(prefix, list(range(120)), 20, 50)
    assert len(prefix) == 2  # the first is covered, the second is not
    assert take(prefix, [*range(50), 999])[1] == 50


def test_checkpoints_are_bounded_and_the_first_and_the_newest_stay():
    prefix = cache()
    put_mixed(prefix, list(range(300)), *range(20, 300, 20))
    (entry,) = prefix.newest_first()
    assert sorted(entry.checkpoints) == [20, 240, 260, 280]
    assert len(entry.checkpoints) == MOST_CHECKPOINTS
    assert entry.nbytes == prefix.nbytes == 8 * (2 * 300 + sum(entry.checkpoints))


@pytest.mark.parametrize(
    ("length", "reused", "common", "marks"),
    [
        (300, 0, 0, [256]),
        (300, 0, 100, [100, 256]),
        (300, 250, 250, []),  # what is left is not worth it
        (300, 100, 100, [256]),
        (70, 0, 0, []),
        (72, 0, 0, [64]),
        (300, 0, 300, [256]),  # nothing branches off at the end
    ],
)
def test_marks_stand_near_the_end_and_where_others_branched_off(length, reused, common, marks):
    assert marks_of(length, reused, common) == marks
    assert all(mark % BLOCK == 0 or mark == common for mark in marks)


@pytest.mark.parametrize(
    ("prompt", "reason", "differs"),
    [
        ([500, 501], "nothing kept begins like it", (-1, -1)),
        ([*range(30), 77, 78], "the first token that differs is number 30", (30, 77)),
        ([*range(40), 77], "it goes on from what was kept", (-1, 77)),
        ([*range(40)], "all of it was kept", (-1, -1)),
        ([*range(5), 77], "5 tokens in common are too few", (5, 77)),
    ],
)
def test_every_lookup_is_explained(prompt, reason, differs):
    prefix = cache()
    put(prefix, list(range(40)))
    _, lookup = prefix.take(prompt)
    assert reason in lookup.reason
    assert lookup.differs == differs


@pytest.mark.parametrize(
    ("prompt", "tokens", "problem", "expected"),
    [
        ([*range(40), 77], 0, "", (40, 0, 40, "it goes on from what was kept", (-1, 77))),
        ([*range(40), 77], 0, "a block was damaged", (40, 0, 40, "a block was damaged", (-1, 77))),
        ([*range(500, 700)], 128, "", (128, 128, 128, "128 tokens were on disk", (-1, -1))),
        ([*range(40), 77], 64, "x", (64, 64, 64, "64 tokens were on disk; then x", (-1, -1))),
    ],
)
def test_a_lookup_that_went_on_to_the_disk_says_what_was_there(prompt, tokens, problem, expected):
    prefix = cache()
    put(prefix, list(range(40)))
    found = asked_of_disk(prefix.take(prompt)[1], tokens, problem)
    assert (found.reused, found.from_disk, found.common, found.reason, found.differs) == expected


def test_a_lookup_says_what_the_kind_of_model_cost():
    prefix = cache()
    put_mixed(prefix, list(range(100)), 32)
    assert "can be taken up after 32 tokens, not after 80" in prefix.take([*range(80), 7])[1].reason


def test_entries_beyond_the_cap_go_least_recently_used_first():
    prefix = cache(max_bytes=8 * 100)
    for start in (0, 1000, 2000):
        put(prefix, list(range(start, start + 40)))
        prefix.take([*range(40), 7])  # the first one stays in use
    assert prefix.nbytes <= 8 * 100
    assert take(prefix, [*range(40), 7])[1] == 40
    assert take(prefix, [*range(1000, 1040), 7]) == (None, 0)


def test_an_entry_larger_than_the_cap_is_not_kept():
    prefix = cache(max_bytes=8)
    put(prefix, list(range(40)))
    assert len(prefix) == 0


def test_keys_rotated_for_another_length_are_not_reused():
    prefix = cache(regime=lambda length: length > 50)
    put(prefix, list(range(40)))
    caches, lookup = prefix.take([*range(40), *range(200, 230)])
    assert caches is None
    assert "another length" in lookup.reason
    assert take(prefix, [*range(40), 7])[1] == 40


@given(st.lists(st.lists(st.integers(0, 1), min_size=17, max_size=60), max_size=12), st.integers(0, 3000))
def test_bytes_are_counted_and_capped_and_hits_are_true(prompts, cap):
    prefix = cache(max_bytes=cap)
    for ids in prompts:
        caches, count = take(prefix, ids)
        if caches is not None:
            assert caches[0].ids == ids[:count]
            assert MIN_TOKENS <= count < len(ids)
        put(prefix, ids)
        assert prefix.nbytes == sum(e.nbytes for e in prefix._entries) <= cap


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=17, max_size=60), st.lists(st.integers(1, 59), max_size=6)
        ),
        max_size=10,
    )
)
def test_states_are_those_after_exactly_the_tokens_that_are_reused(prompts):
    prefix = cache()
    for ids, marks in prompts:
        caches, count = take(prefix, ids)
        if caches is not None:
            assert [each.ids for each in caches] == [ids[:count]] * 2
            assert MIN_TOKENS <= count < len(ids)
        put_mixed(prefix, ids, *(mark for mark in marks if mark < len(ids)))
