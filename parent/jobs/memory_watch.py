"""Whether the machine was short of memory while a job ran: then a SIGKILL that nobody of ours sent was the system's."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil

SHORT = 0.05  # of the memory, as long as so little or less is available
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryWatch:
    """`look` now and then while it runs; `is_short` once it has ended."""

    def __init__(
        self,
        available: Callable[[], float] = lambda: available_share(),
        kills: Callable[[], int] = lambda: oom_kills(),
    ) -> None:
        self._available, self._kills = available, kills
        self._lowest = 1.0
        self._kills_before = kills()

    def look(self) -> None:
        self._lowest = min(self._lowest, self._available())

    def is_short(self) -> bool:
        """Nearly nothing was left, or the kernel says that it has killed for it."""
        self.look()
        return self._lowest <= SHORT or self._kills() > self._kills_before


def available_share() -> float:
    """Of the machine's memory, from 0 to 1."""
    memory = psutil.virtual_memory()
    return float(memory.available) / float(memory.total or 1)


def oom_kills() -> int:
    """Linux: processes that the kernel has killed for want of memory since it started; else 0."""
    try:
        found = _OOM_KILLS.search(Path("/proc/vmstat").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
