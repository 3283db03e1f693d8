"""What a worker holds of the machine's memory, and whether it came back when the worker was gone.

A process that was killed may leave memory behind that the system does not give out again. So the machine is
measured while the worker lives and once it has gone: what should be free and is not counts as missing.
"""

import asyncio
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

TOLERANCE_BYTES = 64 << 20
TOLERANCE_SHARE = 0.25  # of what should come back: others take and give meanwhile
SAMPLE_S = 0.5  # at least, between two looks
POLL_S = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COUNT = re.compile(r"^\s+count:\s+(\d+)$", re.MULTILINE)
_RUSAGE_INFO_V0 = 0
_RUSAGE_BYTES = 96
_FOOTPRINT_AT = 72  # ri_phys_footprint in struct rusage_info_v0: a 16 byte uuid and seven uint64 before it


class Memory(Protocol):
    """Where the numbers come from."""

    def footprint(self, pid: int) -> int:
        """Bytes that only this process and its children hold; 0 where it has ended."""

    def used(self) -> int:
        """Bytes of the machine that are not available."""


class SystemMemory:
    """This machine."""

    def footprint(self, pid: int) -> int:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            return 0
        return sum(map(_held_by, family))

    def used(self) -> int:
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available) - _free_lists()


def _free_lists() -> int:
    """Linux: bytes in the free lists of the CPUs. They are free and not counted as such: since 6.7 the kernel leaves
    hundreds of MiB there for seconds after a large process has ended.
    """
    try:
        zones = Path("/proc/zoneinfo").read_text()
    except OSError:
        return 0
    return sum(map(int, _COUNT.findall(zones))) * _PAGE


def _held_by(process: psutil.Process) -> int:
    """Linux: resident and not shared. macOS: its physical footprint, the memory of the GPU included."""
    if sys.platform == "darwin" and (bytes_ := _physical_footprint(process.pid)):
        return bytes_
    try:
        info = process.memory_info()
    except psutil.Error:
        return 0
    return max(0, int(info.rss) - int(getattr(info, "shared", 0)))


def _physical_footprint(pid: int) -> int:
    """From `proc_pid_rusage` of libproc; 0 where it does not tell."""
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_INFO_V0, buffer)
    except (AttributeError, OSError):
        return 0
    return 0 if failed else int.from_bytes(buffer.raw[_FOOTPRINT_AT : _FOOTPRINT_AT + 8], sys.byteorder)


class Balance:
    """One worker against the machine: `sample` while it lives, `gap` when it has gone.

    `beside` says what the other workers hold: one that loads while this one leaves must not look like a loss.
    """

    def __init__(self, memory: Memory, beside: Callable[[], int]) -> None:
        self.memory = memory
        self.beside = beside
        self.footprint_bytes = 0  # at the last sample
        self.missing_bytes = 0  # not given back, by all that have gone
        self._rest = 0  # what everything else held at the last sample
        self._even = 0  # …and would hold if nothing were missing

    def sample(self, pid: int) -> None:
        """Measure. May take some milliseconds, so not on the event loop."""
        before = self.memory.used()
        footprint = self.memory.footprint(pid)
        used = max(before, self.memory.used())  # it may grow just now, or end
        if footprint:  # else it has ended, and the sample before was better
            self.footprint_bytes, self._rest = footprint, used - self.beside() - footprint

    def gap(self) -> int:
        """Of a worker that has gone: bytes that should be free and are not; 0 within the tolerance."""
        tolerance = max(TOLERANCE_BYTES, int(TOLERANCE_SHARE * self.footprint_bytes))
        if self.footprint_bytes <= tolerance:
            return 0
        gap = self.memory.used() - self.beside() - self._rest
        return 0 if gap <= tolerance else min(gap, self.footprint_bytes)

    def settle(self, gap: int) -> None:
        """Book the gap that remained; the next worker begins anew."""
        if gap:
            self.missing_bytes = self.missing_now(0) + gap
            self._even = self.memory.used() - self.beside() - self.missing_bytes
        self.footprint_bytes = self._rest = 0

    def missing_now(self, pid: int) -> int:
        """What is missing still: it shrinks when the machine gets it back. `pid`: the present worker, 0 = none."""
        if self.missing_bytes:
            own = self.memory.footprint(pid) if pid else 0
            gap = self.memory.used() - self.beside() - own - self._even
            self.missing_bytes = max(0, min(self.missing_bytes, gap))
        return self.missing_bytes


class Tracker:
    """A balance that is kept beside the event loop: measuring takes some milliseconds."""

    def __init__(self, balance: Balance) -> None:
        self.balance = balance
        self._looked_at = float("-inf")
        self._looking: asyncio.Future[None] | None = None

    def look(self, pid: int) -> None:
        """Sample soon, unless that has just been done."""
        now = time.monotonic()
        if now - self._looked_at >= SAMPLE_S and self._looking is None:
            self._looked_at = now
            self._looking = asyncio.ensure_future(asyncio.to_thread(self.balance.sample, pid))
            self._looking.add_done_callback(self._looked)

    def _looked(self, _: object) -> None:
        self._looking = None

    async def returned(self, within_s: float) -> int:
        """Wait until the machine has the memory of a process that has gone; the bytes that are missing in the end.

        No wait where it is back at once, or where the process was never looked at.
        """
        if self._looking is not None:
            await asyncio.wait({self._looking})
        if not self.balance.footprint_bytes:
            return 0
        until = time.monotonic() + within_s
        while True:
            gap = await asyncio.to_thread(self.balance.gap)
            if not gap or time.monotonic() >= until:
                self.balance.settle(gap)
                return gap
            await asyncio.sleep(POLL_S)
