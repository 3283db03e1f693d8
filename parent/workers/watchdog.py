"""Is a ready worker alive? Heartbeats and the clock in, a verdict out. Pure: time is an argument.

Hung is a worker that says nothing for `silence_s`; that has work and gets nowhere with it, or is in one step, for
longer than `limit_s`; or that somebody keeps stopping. `limit_s` is `hung_s` until the worker knows how long its
steps take, then ten times the slowest of them (at least `LEAST_S`, at most `hung_s`). A long prefill is none of
these: its heartbeats come from another thread and its chunks are counted. A gap in the parent's own clock (the
machine slept, the parent was stopped) re-arms.
"""

from collections import deque
from enum import StrEnum

from shared.wire import WorkerStats

LEAST_S = 10.0
SLOWEST = 10  # times the slowest step
STOPS = 3  # a process stopped so often within `STOPS_S` is not woken again
STOPS_S = 60.0


class Verdict(StrEnum):
    """What the heartbeats say."""

    ALIVE = "alive"
    SLOW = "slow"
    HUNG = "hung"


class Watchdog:
    """Call `check` every `interval_s` or so; a much later call counts as a gap."""

    def __init__(self, silence_s: float, hung_s: float, now: float) -> None:
        self.silence_s = silence_s
        self.hung_s = hung_s
        self.busy_s = 0.0
        self.stats = WorkerStats()
        self._heard_at = now
        self._moved_at = now  # when work was last seen to go on, or there was none
        self._checked_at = now
        self._stops: deque[float] = deque()

    @property
    def interval_s(self) -> float:
        return self.silence_s / 5

    @property
    def limit_s(self) -> float:
        """How long work may stand still, or one step last."""
        if not self.stats.slowest_s:
            return self.hung_s
        return min(self.hung_s, max(LEAST_S, SLOWEST * self.stats.slowest_s))

    def heartbeat(self, stats: WorkerStats, busy_s: float, now: float) -> None:
        """A heartbeat arrived; `busy_s` is how long the engine has been in its step."""
        if _progress(stats) != _progress(self.stats) or not stats.active + stats.waiting:
            self._moved_at = now
        self._heard_at = now
        self.stats = stats
        self.busy_s = busy_s

    def stopped(self, now: float) -> bool:
        """Its process was found stopped. False: too often, do not wake it again."""
        while self._stops and self._stops[0] <= now - STOPS_S:
            self._stops.popleft()
        self._stops.append(now)
        return len(self._stops) < STOPS

    def is_silent(self, now: float) -> bool:
        """Silent for so long that somebody should look whether its process is stopped."""
        return now - self._heard_at > self.silence_s / 2

    def check(self, now: float) -> Verdict:
        """The verdict now."""
        if now - self._checked_at > 3 * self.interval_s:
            self._heard_at = self._moved_at = now
        self._checked_at = now
        if self.reason(now):
            return Verdict.HUNG
        slow_s = max(self.busy_s, self._stuck_s)
        return Verdict.SLOW if self.is_silent(now) or slow_s > self.limit_s / 4 else Verdict.ALIVE

    def reason(self, now: float) -> str:
        """Why `check` says hung, for a person; "" where it does not."""
        silent_s = now - self._heard_at
        if silent_s > self.silence_s:
            return f"no heartbeat for {silent_s:.1f} s (the limit is {self.silence_s:.1f} s)"
        if self.busy_s > self.limit_s:
            return f"one engine step has lasted {self.busy_s:.1f} s ({self._limit()})"
        if self._stuck_s > self.limit_s:
            done = f"{self.stats.steps} steps, {self.stats.chunks} chunks, {self.stats.tokens} tokens"
            work = f"{self.stats.active} running and {self.stats.waiting} waiting requests"
            return f"{work} got nowhere for {self._stuck_s:.1f} s, at {done} ({self._limit()})"
        if len(self._stops) >= STOPS and self._stops[0] > now - STOPS_S:
            return f"its process was stopped {len(self._stops)} times within {STOPS_S:.0f} s"
        return ""

    @property
    def _stuck_s(self) -> float:
        """Between heartbeats, so that a silence is not taken for this too."""
        return self._heard_at - self._moved_at

    def _limit(self) -> str:
        known = f", the slowest so far took {self.stats.slowest_s:.2f} s" if self.stats.slowest_s else ""
        return f"the limit is {self.limit_s:.0f} s{known}"


def _progress(stats: WorkerStats) -> tuple[int, int, int]:
    return stats.steps, stats.chunks, stats.tokens
