"""Is a ready worker alive? Heartbeats and the clock in, a verdict out. Pure: time is an argument.

Two faults are told apart from a healthy silence: no heartbeat for `silence_s`, and one engine step that lasts
longer than `hung_s`. A gap in the parent's own clock (the machine slept, the parent was stopped) re-arms.
"""

from enum import StrEnum


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
        self._seen_at = now
        self._checked_at = now

    @property
    def interval_s(self) -> float:
        return self.silence_s / 5

    def heartbeat(self, busy_s: float, now: float) -> None:
        """A heartbeat arrived; `busy_s` is how long the engine has been in its step."""
        self._seen_at = now
        self.busy_s = busy_s

    def check(self, now: float) -> Verdict:
        """The verdict now."""
        if now - self._checked_at > 3 * self.interval_s:
            self._seen_at = now
        self._checked_at = now
        silent_s = now - self._seen_at
        if silent_s > self.silence_s or self.busy_s > self.hung_s:
            return Verdict.HUNG
        if silent_s > self.silence_s / 2 or self.busy_s > self.hung_s / 4:
            return Verdict.SLOW
        return Verdict.ALIVE

    def reason(self, now: float) -> str:
        """Why `check` said hung, for a person."""
        if self.busy_s > self.hung_s:
            return f"one engine step has lasted {self.busy_s:.0f} s (the limit is {self.hung_s:.0f} s)"
        return f"no heartbeat for {now - self._seen_at:.1f} s (the limit is {self.silence_s:.1f} s)"
