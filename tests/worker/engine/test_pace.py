"""How long a step takes, as the parent's watchdog is told."""

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
