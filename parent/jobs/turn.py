"""Answers come first: jobs on the GPU wait between two steps while requests are answered, and a moment longer."""

import asyncio
from collections.abc import Callable

from parent.jobs.policy import Policy


class Turn:
    """`should_wait` says whether jobs have to; `on_change` is called when that may have changed."""

    def __init__(self, policy: Callable[[], Policy], on_change: Callable[[], None]) -> None:
        self._policy = policy
        self._on_change = on_change
        self._are_running = False
        self._quiet: asyncio.TimerHandle | None = None

    @property
    def should_wait(self) -> bool:
        return self._policy().yields and (self._are_running or self._quiet is not None)

    def answers(self, are_running: bool) -> None:
        """Whether requests are answered, or wait to be, just now."""
        if are_running:
            self.close()
        elif self._are_running:
            self._quiet = asyncio.get_running_loop().call_later(self._policy().quiet_s, self._is_quiet)
        self._are_running = are_running
        self._on_change()

    def close(self) -> None:
        """No timer runs any more."""
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _is_quiet(self) -> None:
        self._quiet = None
        self._on_change()
