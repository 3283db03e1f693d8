"""The restart rule: how often and how soon a dead worker is started again. Pure: time is an argument.

At most `budget` restarts in a rolling window. A restart is immediate, unless the worker died early (within
`EARLY_S` of its spawn) for the second time in a row or more: then the wait is 1, 2, 4 … up to 30 seconds.
"""

from collections import deque

EARLY_S = 10.0
MAX_DELAY_S = 30.0


class RestartBudget:
    """Counts the automatic restarts of one worker."""

    def __init__(self, budget: int, window_s: float) -> None:
        self.budget = budget
        self.window_s = window_s
        self.total = 0
        self.early_deaths = 0  # in a row
        self._restarts: deque[float] = deque()
        self._spawned_at = 0.0

    def spawned(self, now: float, *, is_restart: bool) -> None:
        """A process was started; `is_restart` = by this rule, not by a wish."""
        self._spawned_at = now
        if is_restart:
            self.total += 1
            self._restarts.append(now)

    def died(self, now: float) -> None:
        """A process ended that should not have."""
        early = now - self._spawned_at < EARLY_S
        self.early_deaths = self.early_deaths + 1 if early else 0

    def is_spent(self, now: float) -> bool:
        """True when one more restart now would be one too many."""
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        return len(self._restarts) >= self.budget

    @property
    def delay_s(self) -> float:
        """How long to wait before the next restart."""
        return 0.0 if self.early_deaths < 2 else min(MAX_DELAY_S, 2.0 ** (self.early_deaths - 2))

    def reset(self) -> None:
        """An operator asked: forget what happened (the total stays)."""
        self._restarts.clear()
        self.early_deaths = 0
