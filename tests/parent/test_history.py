"""Stored responses: chains against a plain model, under any clock and any cap."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from parent.db import Database
from parent.inference.history import ROW_BYTES, History
from shared.errors import ErrorCode, Refused

TTL_S = 100.0
NAMES = st.sampled_from([f"resp_{letter}" for letter in "abcdefgh"])


class World:
    """A clock and limits that a test turns."""

    def __init__(self) -> None:
        self.now, self.most, self.ttl_s = 1000.0, 2000, TTL_S

    def limits(self) -> tuple[int, float]:
        return self.most, self.ttl_s

    def clock(self) -> float:
        return self.now


class StoreIsTheModel(RuleBasedStateMachine):
    """Random calls against a dict: same answers, same links left, never over the cap."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.world = World()
        self.model: dict[str, dict[str, Any]] = {}  # in the order in which they were stored
        self.uses = 0
        self.open()

    def open(self) -> None:
        self.db = Database(Path(self.folder.name)).open()
        self.history = History(self.db, self.world.limits, self.world.clock)

    def teardown(self) -> None:
        self.runner.run(self.db.close())
        self.runner.close()
        self.folder.cleanup()

    def run(self, work: Any) -> Any:
        """What a call returned, or the failure that it raised."""
        try:
            return self.runner.run(work)
        except Refused as refused:
            return refused.failure

    def sweep(self) -> None:
        now, ttl_s = self.world.now, self.world.ttl_s
        self.model = {name: link for name, link in self.model.items() if link["expires"] > now}
        for link in self.model.values():
            link["expires"] = min(link["expires"], now + ttl_s)

    def make_room(self) -> None:
        while sum(link["bytes"] for link in self.model.values()) > self.world.most:
            order = {name: number for number, name in enumerate(self.model)}
            del self.model[min(self.model, key=lambda name: (self.model[name]["used"], order[name]))]

    def touch(self, name: str | None) -> None:
        while name in self.model:
            self.model[name]["used"] = self.uses
            name = self.model[name]["previous"]

    @rule(name=NAMES, previous=st.none() | NAMES, size=st.integers(0, 900) | st.just(5000))
    def remember(self, name: str, previous: str | None, size: int) -> None:
        got = self.run(self.history.remember(name, previous, b"x" * size, "m"))
        total = size + len(name) + ROW_BYTES
        if total > self.world.most:
            assert got is False
            return
        before = {each: dict(link) for each, link in self.model.items()}
        self.sweep()
        named = {link["previous"] for link in self.model.values()}
        if name in self.model or name in named or name == previous:
            assert got.code is ErrorCode.CONFLICT
            self.model = before  # what is refused changes nothing
            return
        assert got is True
        self.uses += 1
        self.model[name] = {
            "previous": previous, "bytes": total, "used": self.uses, "size": size,
            "expires": self.world.now + self.world.ttl_s,
        }  # fmt: skip
        self.touch(previous)
        self.make_room()

    @rule(name=NAMES, previous=st.none() | NAMES, size=st.integers(0, 900) | st.just(5000))
    def replace(self, name: str, previous: str | None, size: int) -> None:
        got = self.run(self.history.replace(name, previous, b"x" * size, "m"))
        total = size + len(name) + ROW_BYTES
        if total > self.world.most:
            assert got is False
            return
        before = {each: dict(link) for each, link in self.model.items()}
        self.sweep()
        if name == previous or name in {link["previous"] for link in self.model.values()}:
            assert got.code is ErrorCode.CONFLICT
            self.model = before
            return
        assert got is True
        self.model.pop(name, None)
        self.uses = max((link["used"] for link in self.model.values()), default=0) + 1
        self.model[name] = {
            "previous": previous, "bytes": total, "used": self.uses, "size": size,
            "expires": self.world.now + self.world.ttl_s,
        }  # fmt: skip
        self.touch(previous)
        self.make_room()

    @rule(name=NAMES)
    def expand(self, name: str) -> None:
        got = self.run(self.history.expand(name))
        self.sweep()
        self.make_room()
        sizes: list[int] = []
        link: str | None = name
        while link is not None:
            if link not in self.model:
                assert got.code is ErrorCode.NOT_FOUND
                assert f"no response {link}" in got.message
                return
            sizes.insert(0, self.model[link]["size"])
            link = self.model[link]["previous"]
        assert [len(delta) for delta in got] == sizes
        self.uses += 1
        self.touch(name)

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        got = self.run(self.history.get(name))
        link = self.model.get(name)
        if link is None or min(link["expires"], self.world.now + self.world.ttl_s) <= self.world.now:
            assert got.code is ErrorCode.NOT_FOUND
        else:
            assert (got.id, got.previous_id, len(got.delta)) == (name, link["previous"], link["size"])

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        got = self.run(self.history.forget(name))
        assert (got is None) == (name in self.model)
        self.model.pop(name, None)

    @rule(by=st.floats(-300, 300))
    def the_clock_jumps(self, by: float) -> None:
        self.world.now += by

    @rule(most=st.integers(0, 4000), ttl_s=st.floats(1, 300))
    def limits_change(self, most: int, ttl_s: float) -> None:
        self.world.most, self.world.ttl_s = most, ttl_s

    @rule()
    def restart(self) -> None:
        self.runner.run(self.db.close())
        self.open()

    @invariant()
    def stats_are_the_model(self) -> None:
        if hasattr(self, "model"):
            stats = self.runner.run(self.history.stats())
            held = sum(link["bytes"] for link in self.model.values())
            assert (stats.entries, stats.bytes) == (len(self.model), held)


def test_the_store_does_what_a_dict_would() -> None:
    run_state_machine_as_test(
        StoreIsTheModel,
        settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


def using(folder: Path, work: Callable[[History, World], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        db, world = Database(folder).open(), World()
        world.most = 1_000_000
        try:
            return await work(History(db, world.limits, world.clock), world)
        finally:
            await db.close()

    return asyncio.run(main())


async def chain(history: History, *names: str) -> None:
    previous = None
    for name in names:
        await history.remember(name, previous, name.encode(), "m")
        previous = name


def test_a_link_from_the_future_does_not_live_for_ever(tmp_path: Path) -> None:
    async def work(history: History, world: World) -> None:
        world.now = 1e12
        await chain(history, "a")
        world.now = 1000.0
        assert await history.expand("a") == [b"a"]
        world.now += TTL_S + 1
        with pytest.raises(Refused, match="there is no response a"):
            await history.expand("a")
        assert (await history.stats()).entries == 0

    using(tmp_path, work)


def test_a_deleted_link_ends_the_chains_through_it_and_no_other(tmp_path: Path) -> None:
    async def work(history: History, world: World) -> None:
        await chain(history, "a", "b", "c")
        await history.remember("other", "a", b"other", "m")
        await history.forget("b")
        with pytest.raises(Refused, match="no response b, which c follows on"):
            await history.expand("c")
        assert (await history.get("c")).delta == b"c"
        assert await history.expand("other") == [b"a", b"other"]

    using(tmp_path, work)


def test_the_chain_that_was_used_last_stays_whole(tmp_path: Path) -> None:
    async def work(history: History, world: World) -> None:
        await chain(history, "a1", "a2")
        await chain(history, "b1", "b2")
        await history.expand("a2")
        one = ROW_BYTES + 4
        world.most = 4 * one
        await history.remember("c1", None, b"c1", "m")
        with pytest.raises(Refused, match="no response b1"):
            await history.expand("b2")
        assert (await history.get("b2")).delta == b"b2"
        assert await history.expand("a2") == [b"a1", b"a2"]

    using(tmp_path, work)


def test_a_long_chain_is_expanded_in_order(tmp_path: Path) -> None:
    async def work(history: History, world: World) -> None:
        names = [f"r{number:04d}" for number in range(400)]
        await chain(history, *names)
        assert await history.expand(names[-1]) == [name.encode() for name in names]

    using(tmp_path, work)


def test_chains_that_grow_side_by_side_do_not_mix(tmp_path: Path) -> None:
    async def work(history: History, world: World) -> None:
        await asyncio.gather(
            *(chain(history, f"{letter}1", f"{letter}2", f"{letter}3") for letter in "abcdefgh")
        )
        for letter in "abcdefgh":
            expected = [f"{letter}{number}".encode() for number in (1, 2, 3)]
            assert await history.expand(f"{letter}3") == expected

    using(tmp_path, work)
