"""Rows that join, leave, are cancelled, preempted and taken up from kept prompts say what each of them says alone."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracles import checkpoints
from worker.cache.prefix import PrefixCache
from worker.engine.engine import Engine, Loaded, Output
from worker.engine.kv_budget import KvBudget
from worker.engine.sequence import SamplingPlan, Sequence
from worker.models import load_model

PATIENCE_S = 60.0
CASES = ["llama_tied", "mistral_window", "rope_dynamic", "gemma4_e", "qwen3_5"]

PLANS = [
    SamplingPlan(),
    SamplingPlan(temperature=1.0),
    SamplingPlan(temperature=0.8, top_p=0.9, top_k=20),
    SamplingPlan(temperature=1.2, min_p=0.05, repetition_penalty=1.3),
    SamplingPlan(presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((40, 5.0), (41, -5.0))),
]
STEMS = [[7 + (n * k) % 200 for n in range(60)] for k in (3, 5)]


@dataclass(frozen=True)
class Ask:
    """One request: so many tokens of a common stem, then its own; `at` and `leaves`: heard outputs until then."""

    stem: int
    shared: int
    own: tuple[int, ...]
    plan: int
    seed: int
    max_tokens: int
    at: int
    leaves: int | None

    @property
    def prompt(self) -> list[int]:
        return [*STEMS[self.stem][: self.shared], *self.own]

    def sequence(self, name: str) -> Sequence:
        return Sequence(name, self.prompt, self.max_tokens, PLANS[self.plan], self.seed, frozenset((2,)))


asks = st.builds(
    Ask,
    stem=st.integers(0, 1),
    shared=st.integers(0, 60),
    own=st.lists(st.integers(8, 250), min_size=1, max_size=12).map(tuple),
    plan=st.integers(0, len(PLANS) - 1),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 30),
    at=st.integers(0, 60),
    leaves=st.none() | st.integers(1, 60),
)


class Run:
    """An engine on a tiny model, fed by what it says: the n-th output that is heard brings what is due then."""

    def __init__(self, folder: Path, *, max_rows: int, chunk: int, prefix_bytes: int, kv_bytes: int) -> None:
        self.heard = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.fault: BaseException | None = None
        self.due: list[tuple[int, Callable[[], None]]] = []
        self.submitted: set[str] = set()
        self.all_ended = threading.Event()
        self.engine = Engine(self._hear, self._fail)

        def build() -> Loaded:
            model = load_model(folder).model
            prefix = PrefixCache(prefix_bytes, model.regime)
            return Loaded(model, prefix, max_rows, chunk, KvBudget(model.layout, 4, chunk, kv_bytes))

        self.engine.load(build).result(PATIENCE_S)

    def _hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.heard += 1
            if output.token is not None:
                self.tokens.setdefault(output.id, []).append(output.token)
            if output.finish:
                self.ended[output.id] = output.finish
        self._bring()

    def _fail(self, error: BaseException) -> None:
        self.fault = error
        self.all_ended.set()

    def _bring(self) -> None:
        """What is due; and where nobody is left to say anything, what comes next."""
        while self.due and (self.due[0][0] <= self.heard or self.submitted <= set(self.ended)):
            self.due.pop(0)[1]()
        if not self.due and self.submitted <= set(self.ended):
            self.all_ended.set()

    def play(self, requests: dict[str, Ask]) -> None:
        """Run them all, as their times say, to their ends."""

        def start() -> None:
            for name, ask in requests.items():
                self.due.append((ask.at, functools.partial(self._submit, name, ask)))
                if ask.leaves is not None:
                    self.due.append((ask.at + ask.leaves, functools.partial(self.engine.cancel, name)))
            self.due.sort(key=lambda each: each[0])
            self._bring()

        self.engine.call(start).result(PATIENCE_S)
        assert self.all_ended.wait(PATIENCE_S), (self.ended, self.engine.stats())
        assert self.fault is None, self.fault

    def _submit(self, name: str, ask: Ask) -> None:
        self.submitted.add(name)
        self.engine.submit(ask.sequence(name))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("fuzz") / name
        config, seed = checkpoints.case(name)
        return checkpoints.write_model({**config, "max_position_embeddings": 512}, seed, folder)

    return write


@pytest.fixture(scope="module")
def alone(folder_of) -> Callable[[str, Ask], list[int]]:
    """What a request says by itself, with nothing kept."""
    runs: dict[str, Run] = {}

    @functools.cache
    def say(case: str, ask: Ask) -> tuple[int, ...]:
        if case not in runs:
            runs[case] = Run(folder_of(case), max_rows=1, chunk=512, prefix_bytes=0, kv_bytes=0)
        run = runs[case]
        name = f"{len(run.ended)}"
        run.all_ended.clear()
        run.play({name: ask})
        return tuple(run.tokens[name])

    def tokens(case: str, ask: Ask) -> list[int]:
        return list(
            say(case, Ask(ask.stem, ask.shared, ask.own, ask.plan, ask.seed, ask.max_tokens, 0, None))
        )

    yield tokens
    for run in runs.values():
        run.engine.close()


@pytest.mark.parametrize("case", CASES)
@given(
    requests=st.lists(asks, min_size=2, max_size=7),
    max_rows=st.integers(1, 5),
    chunk=st.sampled_from([5, 16, 64]),
    prefix_bytes=st.sampled_from([0, 200_000, 1 << 30]),
    blocks=st.sampled_from([0, 1, 2]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_says_what_it_says_alone(
    case, folder_of, alone, requests, max_rows, chunk, prefix_bytes, blocks
) -> None:
    named = {str(n): ask for n, ask in enumerate(requests)}
    kv_bytes = blocks * 300_000
    run = Run(folder_of(case), max_rows=max_rows, chunk=chunk, prefix_bytes=prefix_bytes, kv_bytes=kv_bytes)
    try:
        run.play(named)
    finally:
        run.engine.close()
    for name, ask in named.items():
        expected, found = alone(case, ask), run.tokens.get(name, [])
        if run.ended[name] == "cancelled":
            assert found == expected[: len(found)], ask
        else:
            assert found == expected, ask
