"""What a data set's job keeps of its units: whatever is cut off the file, what is left is whole and right."""

import asyncio
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ErrorCode, Refused, refuse
from worker.lab.dataset.finishing import finish
from worker.lab.dataset.form import Answer, Drop, Dropped, Kit, Made, Message, Plan, Unit
from worker.lab.dataset.journal import NAME, Journal
from worker.lab.dataset.working import needed, work_off

MADE = st.builds(
    Made,
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=2), max_size=3),
    st.lists(st.builds(Drop, st.text(max_size=5), st.text(max_size=9)), max_size=2),
)


@given(st.lists(MADE, max_size=6), st.data())
def test_a_dataset_journal_holds_what_was_whole_when_it_was_cut(
    mades: list[Made], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal, ends = Journal(folder, "d"), [(folder / NAME).stat().st_size]
        for number, made in enumerate(mades):
            journal.add(number, made)
            ends.append((folder / NAME).stat().st_size)
        journal.close()
        content = (folder / NAME).read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        (folder / NAME).write_bytes(content[:cut])
        again = Journal(folder, "d")
        whole = sum(end <= cut for end in ends) - 1
        assert again.done == dict(enumerate(mades[: max(whole, 0)]))
        again.add(99, Made([{"text": "more"}]))
        again.close()
        last = Journal(folder, "d")
        assert last.done == {**again.done}
        assert not last.started_over
        last.close()


def test_a_dataset_journal_of_something_else_is_begun_anew(tmp_path: Path) -> None:
    first = Journal(tmp_path / "deep" / "er", "one")
    first.add(0, Made([{"a": 1}]))
    first.close()
    second = Journal(tmp_path / "deep" / "er", "two")
    assert (second.done, second.started_over) == ({}, True)
    second.close()
    (tmp_path / NAME).write_bytes(b"\xff\x00 nothing of ours\n{}")
    third = Journal(tmp_path, "one")
    assert (third.done, third.started_over) == ({}, False)
    third.close()


# ---------------------------------------------------------------- units


async def nobody(messages: list[Message], *, seed: int, tools: object = None) -> Answer:
    raise AssertionError


async def no_viewer(path: str, query: object) -> None:
    raise AssertionError


KIT = Kit({}, 1, nobody, no_viewer)


def worked(
    plan: Plan, journal: Journal, make: object, streams: int = 3, check: object = lambda: None
) -> list[int]:
    """-> the units that were made, in the order in which they ended."""
    order: list[int] = []
    asyncio.run(
        work_off(
            plan,
            make,  # type: ignore[arg-type]
            KIT,
            journal,
            streams=streams,
            on_made=lambda number, made: order.append(number),
            check=check,  # type: ignore[arg-type]
        )
    )
    return order


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(0, 10),
    st.integers(1, 5),
    st.integers(0, 1 << 30),
)
def test_a_dataset_is_the_same_whatever_order_its_units_end_in(
    sizes: list[int], limit: int, streams: int, seed: int
) -> None:
    plan = Plan([Unit(f"u{n}", n) for n in range(len(sizes))], limit=limit)
    turns = random.Random(seed)

    async def make(unit: Unit, kit: Kit) -> Made:
        for _ in range(turns.randint(0, 3)):
            await asyncio.sleep(0)
        if not sizes[unit.data]:
            raise Dropped("empty")
        return Made([{"text": f"row {unit.data} {n}"} for n in range(sizes[unit.data])])

    with tempfile.TemporaryDirectory() as name:
        with Journal(Path(name), "d") as journal:
            worked(plan, journal, make, streams)
        rows = [f"row {unit} {n}" for unit, size in enumerate(sizes) for n in range(size)]
        rows = rows[:limit] if limit else rows
        if not rows:
            with pytest.raises(Refused, match="no row came of it"):
                finish(plan, journal.done, deduplicate=True, template="t", inputs={})
            return
        found = finish(plan, journal.done, deduplicate=True, template="t", inputs={})
        valid = found.valid if len(rows) > 1 else []
        assert [row["text"] for row in [*found.train, *valid]] == rows
        used = needed(plan, journal.done)
        assert found.report.dropped == sum(size == 0 for size in sizes[:used])


def test_a_dataset_stops_asking_once_it_has_enough(tmp_path: Path) -> None:
    async def make(unit: Unit, kit: Kit) -> Made:
        return Made([{"text": str(unit.data)}])

    journal = Journal(tmp_path, "d")
    order = worked(Plan([Unit("", n) for n in range(100)], limit=5), journal, make, streams=2)
    journal.close()
    assert len(order) <= 7
    assert set(range(5)) <= set(order)


def test_one_unit_of_a_dataset_that_cannot_go_on_ends_them_all(tmp_path: Path) -> None:
    ended: list[int] = []

    async def make(unit: Unit, kit: Kit) -> Made:
        if unit.data == 1:
            raise refuse(ErrorCode.HUB, "away")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(unit.data)
        return Made()

    with Journal(tmp_path, "d") as journal, pytest.raises(Refused, match="away"):
        worked(Plan([Unit("", n) for n in range(9)]), journal, make, streams=3)
    assert sorted(ended) == [0, 2]


def test_a_dataset_that_is_told_to_stop_lets_go_of_what_it_waits_for(tmp_path: Path) -> None:
    looked = 0

    async def make(unit: Unit, kit: Kit) -> Made:
        await asyncio.Event().wait()
        return Made()

    def check() -> None:
        nonlocal looked
        looked += 1
        if looked > 3:
            raise refuse(ErrorCode.SHUTTING_DOWN, "stopped")

    with Journal(tmp_path, "d") as journal, pytest.raises(Refused, match="stopped"):
        worked(Plan([Unit("", n) for n in range(9)]), journal, make, streams=2, check=check)
