"""Work without a client: its frames reach every reader whole, whenever it comes; a bounded number runs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.inference.background import Background, Run
from shared.errors import ErrorCode, Refused

PATIENCE_S = 60.0


def frame(number: int) -> bytes:
    return b"event: e\ndata: %d\n\n" % number


def run_of() -> Run:
    return Run(lambda: b"{}")


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def read(run: Run, start: int, pause: int = 0) -> bytes:
    found = b""
    async for frames in run.follow(start, PATIENCE_S):
        found += frames
        await turns(pause)
    return found


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_responses_readers_see_every_frame_once_in_order(
    batches: list[int], readers: list[tuple[int, int, int]]
) -> None:
    """Each reader begins at a number, after so many turns of the loop, and reads at its own pace."""
    total = sum(batches)

    async def main() -> None:
        background, run, number = Background(), run_of(), 0

        async def work() -> None:
            nonlocal number
            for size in batches:
                run.publish(b": a comment\n\n" + b"".join(frame(number + at) for at in range(size)))
                number += size
                await turns(2)

        async def reader(start: int, delay: int, pause: int) -> bytes:
            await turns(delay)
            return await read(run, start, pause)

        background.add("a", run)
        background.start("a", work)
        found = await asyncio.gather(*(reader(*each) for each in readers))
        for (start, *_), body in zip(readers, found, strict=True):
            assert body == b"".join(frame(at) for at in range(start, total))
        assert background.num_running == 0
        assert background.get("a") is run

    asyncio.run(main())


def test_responses_readers_hear_of_silence() -> None:
    async def main() -> None:
        run = run_of()
        silence = run.follow(0, 0.0)
        assert await anext(silence) == b""
        run.publish(frame(0))
        assert await anext(silence) == frame(0)

    asyncio.run(main())


def test_responses_in_the_background_are_bounded() -> None:
    async def main() -> None:
        background, go_on = Background(most=2), asyncio.Event()
        for id in "ab":
            background.add(id, run_of())
            background.start(id, go_on.wait)  # type: ignore[arg-type]
        with pytest.raises(Refused) as refused:
            background.add("c", run_of())
        assert refused.value.failure.code is ErrorCode.QUEUE_FULL
        assert refused.value.failure.is_retryable
        go_on.set()
        await turns(3)
        background.add("c", run_of())
        background.drop("c")
        assert background.num_running == 0

    asyncio.run(main())


def test_responses_frames_of_the_newest_are_kept() -> None:
    async def main() -> None:
        one = len(frame(0))
        background = Background(kept_bytes=2 * one)

        def work_of(run: Run) -> Callable[[], Awaitable[None]]:
            async def work() -> None:
                run.publish(frame(0))

            return work

        for id in "abc":
            run = run_of()
            background.add(id, run)
            background.start(id, work_of(run))
            await turns(3)
        assert [background.get(id) is not None for id in "abc"] == [False, True, True]
        background.forget("b")
        assert background.get("b") is None

    asyncio.run(main())


def test_responses_are_cancelled_once_however_many_ask() -> None:
    """What one does at its end, such as to store it, is not cut by who asks later."""

    async def main() -> None:
        background, run = Background(), run_of()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await turns(5)
                run.publish(frame(0))

        background.add("a", run)
        background.start("a", work)
        await turns(1)
        await asyncio.gather(run.cancel(), asyncio.sleep(0), background.close(), run.cancel())
        assert run.is_over
        assert await read(run, 0) == frame(0)

    asyncio.run(main())


def test_responses_that_run_are_ended_with_the_server_and_know_why() -> None:
    async def main() -> None:
        background = Background()
        ends: list[tuple[str, bool]] = []

        def work_of(id: str, run: Run) -> Callable[[], Awaitable[Any]]:
            async def work() -> None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await turns(2)
                    ends.append((id, run.is_shutdown))

            return work

        runs = {id: run_of() for id in "abc"}
        for id, run in runs.items():
            background.add(id, run)
            background.start(id, work_of(id, run))
        await turns(1)
        await runs["a"].cancel()
        await background.close()
        assert sorted(ends) == [("a", False), ("b", True), ("c", True)]
        assert background.num_running == 0
        assert [await read(run, 0) for run in runs.values()] == [b""] * 3
        await background.close()

    asyncio.run(main())
