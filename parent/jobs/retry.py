"""When a job that failed is worth another try. Pure.

A failure is transient when it says after how long trying again may help (`retry_after_s`: a network that was lost,
a hub that is overloaded), or when its code does (its worker died). Tries count only while nothing new comes of them.
"""

from typing import NamedTuple

from shared.errors import ErrorCode, Failure
from shared.jobs import JobStage


class Backoff(NamedTuple):
    """`first_s` before the second try, twice that before the third, and so on to `longest_s`."""

    first_s: float = 1.0
    longest_s: float = 60.0
    tries: int = 8  # without anything new


class NextTry(NamedTuple):
    """`fruitless`: tries so far without anything new. `delay_s`: until the next one; None = no more."""

    fruitless: int
    delay_s: float | None


def is_transient(failure: Failure) -> bool:
    """Another try may go better."""
    if failure.code is ErrorCode.SHUTTING_DOWN:
        return False  # it was told to stop
    return failure.retry_after_s is not None or failure.is_retryable


def after(failure: Failure, fruitless: int, *, grew: bool, backoff: Backoff = Backoff()) -> NextTry:  # noqa: B008
    """What follows on a try that failed. `fruitless`: tries before it; `grew`: it brought something new."""
    if not is_transient(failure):
        return NextTry(fruitless, None)
    count = 0 if grew else fruitless + 1
    if count >= backoff.tries:
        return NextTry(count, None)
    delay = backoff.first_s * 2.0 ** max(count - 1, 0)
    return NextTry(count, min(max(delay, failure.retry_after_s or 0.0), backoff.longest_s))


class Growth:
    """Whether one try got further than where it began, by the count of its stage `grows`."""

    def __init__(self, grows: str) -> None:
        self._grows = grows
        self._first: int | None = None
        self.grew = False

    def see(self, stage: JobStage) -> None:
        """Take in what the try tells."""
        if stage.stage != self._grows:
            return
        if self._first is None:
            self._first = stage.done
        self.grew = self.grew or stage.done > self._first
