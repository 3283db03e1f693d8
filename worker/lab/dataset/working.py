"""Units worked on, some at a time, until all are done or the plan has enough rows."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from worker.lab.dataset.form import Drop, Dropped, Kit, Made, Plan, Unit
from worker.lab.dataset.journal import Journal

Make = Callable[[Unit, Kit], Awaitable[Made]]
LOOK_S = 0.1


def needed(plan: Plan, done: dict[int, Made]) -> int:
    """The result is that of so many first units: all, or those that have enough rows, as far as is known."""
    if not plan.limit:
        return len(plan.units)
    rows = 0
    for number in range(len(plan.units)):
        if number not in done:
            return len(plan.units)
        rows += len(done[number].rows)
        if rows >= plan.limit:
            return number + 1
    return len(plan.units)


async def work_off(
    plan: Plan,
    make: Make,
    kit: Kit,
    journal: Journal,
    *,
    streams: int,
    on_made: Callable[[int, Made], None],
    check: Callable[[], None],
) -> None:
    """Every unit that the result needs and the journal has not. `check` raises to stop, and is asked again and again.

    Raises what it or the first unit that fails raises; then nothing runs any more.
    """
    waiting = (number for number in range(len(plan.units)) if number not in journal.done)
    prefix = _Prefix(plan, journal.done)

    async def stream(waiting: Iterator[int]) -> None:
        for number in waiting:
            if prefix.has_enough():
                return
            check()
            made = await _one(plan.units[number], make, kit.of(number))
            journal.add(number, made)
            on_made(number, made)
            await asyncio.sleep(0)  # units that wait for nothing must not keep the others waiting

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            check()

    watcher = asyncio.create_task(watch())
    running = {asyncio.create_task(stream(waiting)) for _ in range(max(1, streams))}
    tasks = {watcher, *running}
    try:
        left = running
        while left:
            ended, _ = await asyncio.wait({watcher, *left}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            left = left - ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Prefix:
    """The first units as far as all are done, counted on, because a plan may have very many."""

    def __init__(self, plan: Plan, done: dict[int, Made]) -> None:
        self._plan, self._done, self._next, self._rows = plan, done, 0, 0

    def has_enough(self) -> bool:
        """Whether they have the rows of the plan's limit."""
        while self._next in self._done and (not self._plan.limit or self._rows < self._plan.limit):
            self._rows += len(self._done[self._next].rows)
            self._next += 1
        return bool(self._plan.limit) and self._rows >= self._plan.limit


async def _one(unit: Unit, make: Make, kit: Kit) -> Made:
    try:
        return await make(unit, kit)
    except Dropped as dropped:
        return Made(dropped=[Drop(unit.where, str(dropped))])
