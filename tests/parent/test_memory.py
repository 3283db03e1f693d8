"""Memory given back: a worker against the machine, with a machine that does as it is told."""

import asyncio
from pathlib import Path

import pytest

from parent.workers.memory import Balance, Tracker
from parent.workers.states import Limits, State
from tests.process.supervised import become, down, supervisor, write_script

GIB = 1 << 30
MIB = 1 << 20


class Machine:
    """Its memory by holder. What a process leaks stays in use when it has gone."""

    def __init__(self) -> None:
        self.rest = 4 * GIB
        self.held: dict[int, int] = {}
        self.looks = 0
        self.on_look = lambda: None

    def footprint(self, pid: int) -> int:
        return self.held.get(pid, 0)

    def used(self) -> int:
        self.looks += 1
        self.on_look()
        return self.rest + sum(self.held.values())

    def ends(self, pid: int, leaked: int = 0) -> None:
        del self.held[pid]
        self.rest += leaked


def balance(machine: Machine, *, beside: int = 0, held: int = 2 * GIB) -> Balance:
    found = Balance(machine, lambda: machine.held.get(2, 0))
    if beside:
        machine.held[2] = beside
    machine.held[1] = held
    found.sample(1)
    return found


def test_memory_that_comes_back_leaves_no_gap() -> None:
    machine = Machine()
    worker = balance(machine)
    assert worker.footprint_bytes == 2 * GIB
    assert worker.gap() == 2 * GIB  # it is there still
    machine.ends(1)
    assert worker.gap() == 0


@pytest.mark.parametrize(
    ("held", "leaked", "gap"),
    [
        (2 * GIB, 2 * GIB, 2 * GIB),
        (2 * GIB, GIB, GIB),
        (2 * GIB, 500 * MIB, 0),  # within a quarter
        (200 * MIB, 63 * MIB, 0),  # within 64 MiB
        (200 * MIB, 100 * MIB, 100 * MIB),
        (60 * MIB, 60 * MIB, 0),  # too little to tell
    ],
)
def test_a_gap_is_what_is_missing_beyond_the_tolerance(held: int, leaked: int, gap: int) -> None:
    machine = Machine()
    worker = balance(machine, held=held)
    machine.ends(1, leaked)
    assert worker.gap() == gap


def test_a_gap_is_never_more_than_the_worker_held() -> None:
    machine = Machine()
    worker = balance(machine)
    machine.ends(1, 2 * GIB)
    machine.rest += 50 * GIB  # somebody else's
    assert worker.gap() == 2 * GIB


def test_another_worker_that_loads_meanwhile_is_no_gap() -> None:
    machine = Machine()
    worker = balance(machine, beside=GIB)
    machine.ends(1)
    machine.held[2] += 3 * GIB
    assert worker.gap() == 0


def test_a_sample_of_a_process_that_has_just_gone_changes_nothing() -> None:
    machine = Machine()
    worker = balance(machine)
    machine.ends(1, 2 * GIB)
    worker.sample(1)
    assert worker.gap() == 2 * GIB


def test_missing_memory_heals_when_the_machine_gets_it_back() -> None:
    machine = Machine()
    worker = balance(machine)
    machine.ends(1, 2 * GIB)
    worker.settle(worker.gap())
    assert worker.missing_now(0) == 2 * GIB
    machine.held[9] = GIB  # the next worker of the same model
    assert worker.missing_now(9) == 2 * GIB
    machine.rest -= GIB
    assert worker.missing_now(9) == GIB
    machine.rest -= GIB
    assert worker.missing_now(9) == 0
    machine.rest += GIB
    assert worker.missing_now(9) == 0  # what is back is not missing again


def test_what_two_workers_leave_missing_adds_up() -> None:
    machine = Machine()
    worker = balance(machine)
    machine.ends(1, GIB)
    worker.settle(worker.gap())
    machine.held[1] = 2 * GIB
    worker.sample(1)
    machine.ends(1, 2 * GIB)
    worker.settle(worker.gap())
    assert worker.missing_now(0) == 3 * GIB


def test_nobody_waits_for_memory_that_is_back_at_once() -> None:
    machine = Machine()
    tracker = Tracker(balance(machine))
    machine.ends(1)
    machine.looks = 0
    assert asyncio.run(tracker.returned(1000.0)) == 0
    assert machine.looks == 1


def test_memory_that_is_late_is_waited_for() -> None:
    machine = Machine()
    tracker = Tracker(balance(machine))
    machine.ends(1, 2 * GIB)

    async def main() -> int:
        machine.on_look = lambda: setattr(machine, "rest", 4 * GIB) if machine.looks == 5 else None
        return await tracker.returned(1000.0)

    assert asyncio.run(main()) == 0
    assert tracker.balance.missing_bytes == 0


class OneWorker(Machine):
    """The machine of a supervisor's test: whatever process asks holds the same, until the test says that it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2 * GIB
        self.alive = True

    def footprint(self, pid: int) -> int:
        return self.size if self.alive else 0

    def used(self) -> int:
        return self.rest + self.footprint(0)


def test_a_supervisor_waits_in_vain_and_tells_what_is_missing_until_it_is_back(tmp_path: Path) -> None:
    machine = OneWorker()

    async def main() -> None:
        told: list[int] = []
        each = supervisor(
            tmp_path,
            write_script(tmp_path / "model", {}),
            memory=machine,
            limits=Limits(reclaim_s=0.3, stop_grace_s=0.5),
        )
        each._on_change = lambda: told.append(each.missing_bytes)
        each.want()
        await become(each, lambda: each.footprint_bytes == machine.size, "a look at its memory")
        machine.rest += machine.size  # it will not come back
        machine.alive = False
        each.stop()
        await become(each, lambda: each.state is State.RECLAIMING, "the exit")
        await each.absent()
        assert told[-1] == each.missing_bytes == machine.size
        assert each.view()["missing_bytes"] == machine.size
        machine.rest -= machine.size
        assert each.missing_now() == 0
        await down(each)

    asyncio.run(main())
