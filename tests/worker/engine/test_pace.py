"""How long a step takes, as the parent's watchdog is told."""

import random

import pytest

from worker.engine.pace import Pace

CHUNK = 64


def pace(*steps: tuple[float, int]) -> float:
    """The slowest of (seconds, tokens of prefill)."""
    found = Pace()
    for took_s, num_prefill in steps:
        found.step(took_s, num_prefill, CHUNK)
    return found.slowest_s


def test_nothing_is_known_until_a_second_chunk_was_measured():
    assert pace() == 0
    assert pace((9.0, CHUNK)) == 0  # may have compiled
    assert pace((9.0, CHUNK), (0.1, 0), (0.1, 0), (0.1, 0)) == 0
    assert pace((9.0, CHUNK), (0.5, CHUNK)) == 0.5


def test_the_slowest_counts_and_the_first_of_its_kind_does_not():
    assert pace((9.0, CHUNK), (0.5, CHUNK), (8.0, 0), (0.7, 0), (0.6, 0)) == 0.7
    assert pace((8.0, 0), (0.7, 0), (9.0, CHUNK), (0.5, CHUNK)) == 0.7


def test_a_short_chunk_counts_as_a_whole_one_and_a_tiny_one_not_at_all():
    assert pace((9.0, CHUNK), (0.5, CHUNK // 2)) == 1.0
    assert pace((9.0, CHUNK), (0.5, CHUNK // 16), (0.5, CHUNK // 16)) == 0


@pytest.mark.parametrize("token_s", [0.0005, 0.004, 0.02])
def test_rows_that_decode_keep_half_their_pace_and_a_prompt_gets_its_share(token_s):
    noise = random.Random(3)
    pace = Pace()
    now, decoded, prompt = 0.0, 0, 0
    for number in range(400):
        count = pace.budget(CHUNK) if number >= 5 else 0
        took = (0.1 + count * token_s) * noise.uniform(0.9, 1.1)
        pace.step(took, count, CHUNK, decoded=True)
        now, decoded, prompt = now + took, decoded + 1, prompt + count
    assert decoded * 0.1 / now >= 0.5
    fits = CHUNK * token_s < 0.07  # a whole chunk in every step takes less than the share
    assert prompt * token_s / now >= (0.22 if fits else 0.38)


def test_nobody_decodes_and_a_prompt_owes_nothing():
    pace = Pace()
    for _ in range(3):
        pace.step(0.1, 0, CHUNK, decoded=True)
    pace.step(5.0, CHUNK, CHUNK, decoded=True)
    assert pace.budget(CHUNK) == 0
    pace.step(0.5, CHUNK, CHUNK)
    assert pace.budget(CHUNK) > 0


def test_many_prompts_beside_few_rows_get_more():
    pace = Pace()
    for _ in range(3):
        pace.step(0.1, 0, 1024, decoded=True)
    pace.step(0.132, 32, 1024, decoded=True)  # 1 ms a token
    pace.step(0.1, 0, 1024, decoded=True)
    alone, even = pace.budget(1024, decoding=4, prefilling=1), pace.budget(1024, decoding=4, prefilling=4)
    assert alone == even > 32
    assert pace.budget(1024, decoding=2, prefilling=8) > 2 * even
