"""In-process publish and subscribe: numbered events in a ring; a slow subscriber loses the oldest, never blocks."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

RING = 256


class Event(NamedTuple):
    """One published fact. `data` is encoded by whoever shows it."""

    id: int
    kind: str
    data: Any


class Bus:
    """One per parent. Everything runs on its event loop."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque(maxlen=RING)
        self._last_id = 0
        self._arrived = asyncio.Event()
        self._closed = False

    @property
    def last_id(self) -> int:
        return self._last_id

    def publish(self, kind: str, data: Any) -> None:
        """Tell everyone."""
        self._last_id += 1
        self._ring.append(Event(self._last_id, kind, data))
        self._wake()

    def close(self) -> None:
        """End every subscription, after what is already published."""
        self._closed = True
        self._wake()

    async def subscribe(self, after: int) -> AsyncIterator[Event]:
        """Events with an id above `after`, as far back as the ring reaches, until `close`."""
        while True:
            arrived = self._arrived
            for event in [event for event in self._ring if event.id > after]:
                after = event.id
                yield event
            if arrived is not self._arrived:
                continue  # something came while the subscriber was busy
            if self._closed:
                return
            await arrived.wait()

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()
