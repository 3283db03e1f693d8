"""A row that waits for the disk: it is told once that it begins, also when it has to give way meanwhile."""

import queue
from collections.abc import Callable, Iterator

import pytest

from shared.kv_layout import LayerKv
from tests.fakes.model import SuccessorModel
from worker.cache.prefix import PrefixCache
from worker.cache.store import Found
from worker.engine.engine import Engine, Loaded, Output
from worker.engine.kv_budget import BLOCK, KvBudget
from worker.engine.sequence import SamplingPlan, Sequence

PATIENCE_S = 20.0
TOKEN = 8  # bytes
ON_DISK = [7] * 100


class Disk:
    """It has the beginning of one prompt, as it says, and gives what it is told to."""

    restored_bytes = disk_bytes = 0

    def __init__(self, gives: list[Found | None]) -> None:
        self.gives = gives  # one after the other; None: no answer

    def find(self, ids: list[int], regime: object, beyond: int = 0) -> Found:
        return Found(64 if list(ids[:100]) == ON_DISK else 0, [])

    def fetch(self, found: Found, on_done: Callable[[Found], None]) -> None:
        given = self.gives.pop(0)
        if given is not None:
            on_done(given)

    def offer(self, *given: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def run() -> Iterator[Callable]:
    engines: list[Engine] = []
    faults: list[BaseException] = []

    def build(gives: list[Found | None], *rows: Sequence, blocks: int) -> tuple[list[Output], PrefixCache]:
        """Everything that is said of the rows until all have ended."""
        heard: queue.SimpleQueue[Output] = queue.SimpleQueue()
        engine = Engine(lambda outputs: [heard.put(one) for one in outputs] and None, faults.append)
        engines.append(engine)
        prefix = PrefixCache(1 << 20, lambda length: 0)
        kv = KvBudget([LayerKv(1, 1)], 4, 64, blocks * BLOCK * TOKEN)
        engine.load(lambda: Loaded(SuccessorModel(), prefix, 4, 64, kv, store=Disk(gives))).result(PATIENCE_S)
        for row in rows:
            engine.submit(row)
        told: list[Output] = []
        while sum(one.finish is not None for one in told) < len(rows):
            told.append(heard.get(timeout=PATIENCE_S))
        assert engine.stats().active == 0
        return told, prefix

    yield build
    for engine in engines:
        engine.close()
    assert faults == []


def row(name: str, prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(name, prompt, max_tokens, SamplingPlan(), 0, frozenset())


def test_a_row_that_gives_way_while_it_waits_for_the_disk_is_told_once_that_it_begins(run):
    """The older one needs a third block; the other is asked of the disk twice, and has been told of neither time."""
    gives = [None, Found(0, [])]
    told, _ = run(gives, row("old", [1] * 20, 600), row("new", ON_DISK, 5), blocks=3)
    assert gives == []
    for name in ("old", "new"):
        mine = [one for one in told if one.id == name]
        assert [one.admitted for one in mine] == [True] + [False] * (len(mine) - 1)
    assert [one.token for one in told if one.id == "new" and one.token is not None] == [8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Found(0, []), "nothing kept begins like it"),
        (Found(0, [], problem="a block on disk was damaged: x"), "a block on disk was damaged: x"),
    ],
)
def test_a_lookup_is_written_down_once_and_says_what_came_of_the_disk(run, given, reason):
    _, prefix = run([given], row("a", ON_DISK, 2), blocks=0)
    [lookup] = prefix.lookups
    assert (lookup.reused, lookup.from_disk, lookup.reason) == (0, 0, reason)
