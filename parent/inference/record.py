"""What the log says of one request: a line when it is over, whatever its end."""

import logging
import time

from parent.pool.lease import Lease
from shared import logs, wire

log = logging.getLogger(__name__)


class Record:
    """Filled while the request lives. `end` is a finish reason, an error code, `left` or `cut`."""

    def __init__(self) -> None:
        self.model = ""
        self.stream = False
        self.end = "cut"
        self.finish: wire.Finish | None = None
        self.tokens = 0  # handed out
        self.lease: Lease | None = None
        self._began = time.monotonic()
        self._first_s: float | None = None

    def status(self) -> str:
        """What the request waits for, for a person; "" when it does not wait."""
        return self.lease.status() if self.lease is not None else ""

    def first_token(self) -> None:
        """Content is there. Only the first time counts."""
        if self._first_s is None:
            self._first_s = time.monotonic() - self._began

    def finished(self, finish: wire.Finish) -> None:
        """The answer is complete."""
        self.finish, self.end = finish, finish.reason

    def write(self) -> None:
        """The line; its request id comes from the context."""
        first = self._first_s
        logs.event(
            log,
            "request.finished",
            model=self.model,
            stream=self.stream,
            end=self.end,
            prompt_tokens=self.finish.usage.prompt_tokens if self.finish else None,
            tokens=self.finish.usage.completion_tokens if self.finish else self.tokens,
            ttft_s=None if first is None else round(first, 3),
            seconds=round(time.monotonic() - self._began, 3),
        )
