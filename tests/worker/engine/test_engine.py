"""The engine thread with a scripted model: ends, cancels, many rows, reuse, faults."""

import queue
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.model import SuccessorModel
from worker.cache.prefix import PrefixCache
from worker.engine.engine import Engine, Loaded, Output
from worker.engine.sequence import SamplingPlan, Sequence

PATIENCE_S = 20.0


class Harness:
    """An engine and everything it said, by sequence."""

    def __init__(
        self, *, follow=None, max_rows: int = 4, chunk: int = 8, prefix_bytes: int = 1 << 20
    ) -> None:
        self.heard: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.outputs: dict[str, list[Output]] = {}
        self.fault: BaseException | None = None
        self.faulted = threading.Event()
        self.engine = Engine(self._hear, self._fail)
        self.model: SuccessorModel | None = None

        def build() -> Loaded:
            self.model = SuccessorModel(follow=follow)
            prefix = PrefixCache(prefix_bytes, self.model.regime)
            return Loaded(self.model, prefix, max_rows, chunk)

        self.loaded = self.engine.load(build).result(PATIENCE_S)

    def _hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.heard.put(output)

    def _fail(self, error: BaseException) -> None:
        self.fault = error
        self.faulted.set()

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 5, eos: tuple[int, ...] = (), **more
    ) -> None:
        self.engine.submit(Sequence(name, prompt, max_tokens, SamplingPlan(), 0, frozenset(eos), **more))

    def until(self, name: str, last=lambda output: output.finish) -> list[Output]:
        """Outputs of `name` up to the first for which `last` holds."""
        while True:
            mine = self.outputs.setdefault(name, [])
            for place, output in enumerate(mine):
                if last(output):
                    return mine[: place + 1]
            output = self.heard.get(timeout=PATIENCE_S)
            self.outputs.setdefault(output.id, []).append(output)

    def tokens(self, name: str) -> list[int]:
        return [o.token for o in self.until(name) if o.token is not None]


@pytest.fixture
def make() -> Iterator:
    made: list[Harness] = []

    def build(**options) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield build
    for harness in made:
        harness.engine.close()


def test_a_sequence_is_admitted_prefilled_decoded_and_ended_by_length(make):
    harness = make()
    harness.submit("a", list(range(20)), max_tokens=3)
    outputs = harness.until("a")
    assert outputs[0].admitted
    assert [o.prefilled for o in outputs if o.prefilled] == [8, 16, 20]
    assert [o.token for o in outputs if o.token is not None] == [20, 21, 22]
    assert outputs[-1].finish == "length"


def test_eos_ends_a_sequence(make):
    harness = make()
    harness.submit("a", [5], max_tokens=50, eos=(9,))
    assert harness.tokens("a") == [6, 7, 8, 9]
    assert harness.until("a")[-1].finish == "stop"


def test_the_last_token_of_a_budget_is_not_run(make):
    """Pipelining must not run rows past their length: 3 tokens of prompt, then 4 of 5 answer tokens."""
    harness = make()
    harness.submit("a", [1, 2, 3], max_tokens=5)
    harness.until("a")
    assert harness.engine.call(lambda: list(harness.model.calls)).result(PATIENCE_S) == [3, 1, 1, 1, 1]


def test_rows_run_together_and_each_says_what_it_would_alone(make):
    harness = make(max_rows=3)
    for name, start, budget in [("a", 1, 12), ("b", 40, 3), ("c", 60, 7), ("d", 80, 5)]:
        harness.submit(name, [start], max_tokens=budget)
    for name, start, budget in [("a", 1, 12), ("b", 40, 3), ("c", 60, 7), ("d", 80, 5)]:
        assert harness.tokens(name) == [start + 1 + i for i in range(budget)]


def test_a_running_row_gets_tokens_while_a_long_prompt_is_prefilled(make):
    harness = make(chunk=4)
    harness.submit("talker", [1], max_tokens=60)
    harness.until("talker", lambda o: o.token is not None)
    harness.submit("reader", [2] * 40, max_tokens=1)
    harness.until("reader")
    harness.until("talker")
    order = [o for o in harness.outputs["talker"] if o.token is not None]
    assert len(order) == 60
    assert len([o for o in harness.outputs["reader"] if o.prefilled]) == 10


def test_cancel_ends_waiting_prefilling_and_decoding_sequences(make):
    harness = make(max_rows=1, chunk=1)
    harness.submit("first", [1] * 30, max_tokens=10_000)
    harness.submit("second", [2], max_tokens=5)
    harness.until("first", lambda o: o.prefilled)
    harness.engine.cancel("second")
    assert harness.until("second")[-1].finish == "cancelled"
    harness.engine.cancel("first")
    assert harness.until("first")[-1].finish == "cancelled"
    harness.engine.cancel("first")  # again: harmless
    harness.engine.cancel("nobody")
    harness.submit("third", [3], max_tokens=2)
    assert harness.tokens("third") == [4, 5]


def test_the_prefix_of_an_ended_sequence_is_not_run_again(make):
    harness = make(chunk=64)
    prompt = list(range(30))
    harness.submit("a", prompt, max_tokens=3)
    harness.until("a")
    harness.submit("b", prompt, max_tokens=3)
    admitted = harness.until("b")[0]
    assert admitted.reused == 29  # one token is left to run: its logits are needed
    assert harness.tokens("b") == harness.tokens("a")
    harness.submit("c", [*prompt, 30, 31, 50], max_tokens=2)
    assert harness.until("c")[0].reused == 32
    assert harness.tokens("c") == [51, 52]


def test_what_was_prefilled_before_a_cancel_is_kept(make):
    harness = make(chunk=4, max_rows=1)
    prompt = list(range(90))
    harness.submit("a", prompt, max_tokens=5)
    harness.until("a", lambda o: (o.prefilled or 0) >= 40)
    harness.engine.cancel("a")
    harness.until("a")
    harness.submit("b", prompt, max_tokens=2)
    assert harness.until("b")[0].reused >= 40
    assert harness.tokens("b") == [90, 91]


def test_cached_ids_are_what_the_cache_holds_however_a_sequence_ends(make):
    """eos, length and cancel: the ids that are booked are those the cache was really given."""
    harness = make(chunk=64)
    harness.submit("eos", list(range(20)), max_tokens=50, eos=(25,))
    harness.submit("length", [60 + i for i in range(20)], max_tokens=4)
    harness.until("eos")
    harness.until("length")

    def entries() -> list[tuple[list[int], list[int]]]:
        return [(e.ids, e.caches[0].ids) for e in harness.loaded.prefix._entries]

    kept = harness.engine.call(entries).result(PATIENCE_S)
    assert len(kept) == 2
    for booked, held in kept:
        assert booked == held[: len(booked)]
        assert len(held) == len(booked)


def test_a_resumed_sequence_goes_on_with_the_same_draws(make):
    harness = make()
    harness.submit("whole", [1, 2], max_tokens=6)
    whole = harness.tokens("whole")
    harness.submit("rest", [1, 2, *whole[:4]], max_tokens=6, num_resumed=4)
    assert harness.tokens("rest") == whole[4:]


def test_an_error_in_a_step_is_reported_once_and_the_thread_ends(make):
    def broken(token: int) -> int:
        return token

    harness = make(follow=broken)

    def fail(*_) -> None:
        raise RuntimeError("the device is gone")

    harness.engine.call(lambda: setattr(harness.model, "head", fail)).result(PATIENCE_S)
    harness.submit("a", [1])
    assert harness.faulted.wait(PATIENCE_S)
    assert "device is gone" in str(harness.fault)


def test_a_load_that_fails_is_raised_to_whoever_asked(make):
    harness = make()

    def build() -> Loaded:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        harness.engine.load(build).result(PATIENCE_S)


def test_idle_engine_is_not_busy_and_counts_what_it_did(make):
    harness = make()
    harness.submit("a", [1], max_tokens=4)
    harness.until("a")
    harness.engine.call(lambda: None).result(PATIENCE_S)
    assert harness.engine.busy_s() == 0
    stats = harness.engine.stats()
    assert stats.tokens == 4
    assert stats.active == stats.waiting == 0
    assert stats.steps >= 4


@pytest.mark.parametrize("after", range(14))
def test_a_row_may_be_cancelled_at_every_step_and_nobody_else_notices(make, after):
    """4 pieces of prompt, then tokens: the cancel comes in the step that follows the n-th word of the row."""
    harness = make(chunk=5, max_rows=3)
    heard = 0

    def hear(outputs: list[Output]) -> None:
        nonlocal heard
        for output in outputs:
            if output.id == "a":
                heard += 1
                if heard == after + 1:
                    harness.engine.cancel("a")
            harness.heard.put(output)

    harness.engine.on_outputs = hear
    harness.submit("a", list(range(20)), max_tokens=40)
    harness.submit("b", [50, 51], max_tokens=12)
    harness.submit("c", list(range(18)), max_tokens=3)
    assert harness.tokens("b") == [52 + n for n in range(12)]
    assert harness.tokens("c") == [18, 19, 20]
    assert harness.until("a")[-1].finish == "cancelled"
    said = [o.token for o in harness.outputs["a"] if o.token is not None]
    assert said == [20 + n for n in range(len(said))]

    def entries() -> list[tuple[list[int], list[int]]]:
        return [(e.ids, e.caches[0].ids) for e in harness.loaded.prefix.newest_first()]

    for booked, held in harness.engine.call(entries).result(PATIENCE_S):
        assert booked == held
