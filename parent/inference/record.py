"""What the log says of one request: a line when it is over, whatever its end."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Literal

import msgspec

from parent.pool.lease import Lease
from parent.protocols.base import STATUS
from shared import logs, wire
from shared.asgi import ClientGone
from shared.errors import ErrorCode, Refused

log = logging.getLogger(__name__)
_STATUS = {str(code): status for code, status in STATUS.items()} | {
    "left": 499,  # nginx's number for a client that has, which readers of logs know
    "cut": 503,
}


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
        self._choices: list[Record] = []

    def status(self) -> str:
        """What the request waits for, for a person; "" when it does not wait."""
        if self._choices:
            return next((status for each in self._choices if (status := each.status())), "")
        return self.lease.status() if self.lease is not None else ""

    def split(self, count: int) -> list["Record"]:
        """A record for each of so many answers to one request; this one speaks for all of them."""
        self._choices = [Record() for _ in range(count)]
        return self._choices

    def first_token(self) -> None:
        """Content is there. Only the first time counts."""
        if self._first_s is None:
            self._first_s = time.monotonic() - self._began

    def finished(self, finish: wire.Finish) -> None:
        """The answer is complete."""
        self.finish, self.end = finish, finish.reason

    def write(self) -> None:
        """The line; its request id comes from the context."""
        self._gather()
        first = self._first_s
        logs.event(
            log,
            "request.finished",
            model=self.model,
            stream=self.stream,
            end=self.end,
            status=status_of(self.end),
            prompt_tokens=self.finish.usage.prompt_tokens if self.finish else None,
            tokens=self.finish.usage.completion_tokens if self.finish else self.tokens,
            ttft_s=None if first is None else round(first, 3),
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _gather(self) -> None:
        """What the choices know, together."""
        finishes = [each.finish for each in self._choices if each.finish is not None]
        firsts = [each._first_s for each in self._choices if each._first_s is not None]
        self._first_s = min(firsts, default=self._first_s)
        self.tokens += sum(each.tokens for each in self._choices)
        if finishes and len(finishes) == len(self._choices):
            self.finished(total(finishes))


class Reading:
    """Of a request whose texts are read: vectors or a ranking. Used around it.

    `end` is `done`, `failed` (then `code` says why), `left` or `cut`.
    """

    def __init__(self, kind: Literal["embeddings", "rerank"]) -> None:
        self.kind = kind
        self.model = ""
        self.inputs = 0
        self.prompt_tokens: int | None = None
        self.end = "done"
        self.code: str | None = None
        self._began = time.monotonic()

    def left(self) -> None:
        """The client has, before its answer was complete."""
        self.end = "left"

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The line; its request id comes from the context."""
        if isinstance(error, ClientGone):
            self.left()
        elif isinstance(error, asyncio.CancelledError):
            self.end = "cut"
        elif error is not None:
            self.end = "failed"
            self.code = error.failure.code if isinstance(error, Refused) else ErrorCode.INTERNAL
        logs.event(
            log,
            "request.finished",
            model=self.model,
            kind=self.kind,
            inputs=self.inputs,
            end=self.end,
            code=self.code,
            status=status_of(self.code or self.end),
            prompt_tokens=self.prompt_tokens,
            seconds=round(time.monotonic() - self._began, 3),
        )


def status_of(end: str) -> int:
    """The status that a request of this end has, or would have, had its headers not left before."""
    return _STATUS.get(end, 200)


def total(finishes: list[wire.Finish]) -> wire.Finish:
    """The end of several answers as if they were one: the last reason, the sum of what was used."""
    used = [finish.usage for finish in finishes]
    usage = wire.Usage(
        sum(each.prompt_tokens for each in used),
        sum(each.completion_tokens for each in used),
        sum(each.cached_tokens for each in used),
        sum(each.reasoning_tokens for each in used),
    )
    return msgspec.structs.replace(finishes[-1], usage=usage)
