"""Work that goes on without its client: its frames are kept, so that whoever comes can read them from any place.

A bounded number runs at a time. The frames of those that have ended are kept for readers that come late, the newest
first, up to a number of bytes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.errors import ErrorCode, refuse

MOST = 32  # that run at a time
KEPT_BYTES = 32 << 20  # frames of those that have ended
STOPPED = "the server was stopped or restarted while this response was being made; ask again"


class Run:
    """One piece of work. `frames[n]` has the sequence number n; `snapshot` tells how far it is."""

    def __init__(self, snapshot: Callable[[], bytes]) -> None:
        self.snapshot = snapshot
        self.frames: list[bytes] = []
        self.is_over = False
        self.is_shutdown = False  # why it was cancelled: the server leaves
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._moved = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frames))

    def begin(self, work: Callable[[], Awaitable[None]], done: Callable[[], None]) -> None:
        """Start; `work` publishes frames, and takes a cancel as its end."""

        async def whole() -> None:
            await work()

        def over(_: object) -> None:
            self.is_over = True
            done()
            self._tell()

        self._task = asyncio.get_running_loop().create_task(whole())
        self._task.add_done_callback(over)

    def publish(self, frames: bytes) -> None:
        """Frames of server-sent events; comments among them are not kept."""
        new = [frame + b"\n\n" for frame in frames.split(b"\n\n") if frame and not frame.startswith(b":")]
        if new:
            self.frames += new
            self._tell()

    async def follow(self, start: int, patience_s: float) -> AsyncIterator[bytes]:
        """The frames from `start` on as they come, joined where there are several; b"" after so long a silence."""
        while True:
            moved, is_over = self._moved, self.is_over
            if len(self.frames) > start:
                frames, start = self.frames[start:], len(self.frames)
                yield b"".join(frames)
            elif is_over:
                return
            else:
                try:
                    async with asyncio.timeout(patience_s):
                        await moved.wait()
                except TimeoutError:
                    yield b""

    async def cancel(self) -> None:
        """Returns once it is over. It is cancelled once, whoever else asks: what it does at its end is not cut."""
        if self._task is not None:
            if not self._is_cancelled:
                self._is_cancelled = True
                self._task.cancel()
            await asyncio.wait({self._task})

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


class Background:
    """All runs by their ids."""

    def __init__(self, most: int = MOST, kept_bytes: int = KEPT_BYTES) -> None:
        self._most, self._kept_bytes = most, kept_bytes
        self._running: dict[str, Run] = {}
        self._ended: dict[str, Run] = {}  # in the order in which they ended

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def all_running(self) -> frozenset[str]:
        """Their ids."""
        return frozenset(self._running)

    def add(self, id: str, run: Run) -> None:
        """A place for a run that begins soon. Raises `Refused` (queue_full) where there is none."""
        if len(self._running) >= self._most:
            raise refuse(
                ErrorCode.QUEUE_FULL,
                f"{self._most} responses run in the background already",
                retry_after_s=5.0,
            )
        self._running[id] = run

    def drop(self, id: str) -> None:
        """One that does not begin."""
        del self._running[id]

    def start(self, id: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` under this id until it ends."""
        run = self._running[id]
        run.begin(work, lambda: self._over(id, run))

    def running(self, id: str) -> Run | None:
        """One that runs."""
        return self._running.get(id)

    def get(self, id: str) -> Run | None:
        """One that runs, or whose frames are still kept."""
        return self._running.get(id) or self._ended.get(id)

    def forget(self, id: str) -> None:
        """Drop the frames of one that has ended."""
        self._ended.pop(id, None)

    async def close(self) -> None:
        """End all that run."""
        runs = list(self._running.values())
        for run in runs:
            run.is_shutdown = True
        await asyncio.gather(*(run.cancel() for run in runs))

    def _over(self, id: str, run: Run) -> None:
        del self._running[id]
        self._ended[id] = run
        held = sum(each.num_bytes for each in self._ended.values())
        for old in list(self._ended):
            if held <= self._kept_bytes:
                return
            held -= self._ended.pop(old).num_bytes
