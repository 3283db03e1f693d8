"""What every public wire format is made of: bytes to a request, events to bytes, failures to bytes. Pure.

A `Protocol` is a record of functions and one line in the table of `parent/protocols/__init__.py`. Its stream
encoder is a `CompletionStreamProtocol`: the request pipeline feeds it events and sends what it returns, and
knows nothing else of any format.
"""

from collections.abc import Callable
from typing import NamedTuple
from typing import Protocol as Interface

import msgspec

from shared import wire
from shared.errors import ErrorCode, Failure


class DecodedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request in our words. `model` is the name the client sent, "" = none."""

    prompt: wire.Prompt
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    sampling: wire.Sampling = wire.Sampling()
    max_tokens: int | None = None
    max_context: int = 0  # tokens of prompt and answer; 0 = the model's
    stop: list[str] = []
    seed: int | None = None
    split_reasoning: bool = True
    keep_alive_s: float | None = (
        None  # how long the model stays once idle; inf = for ever, None = as configured
    )

    def to_generate(self, request_id: str, seed: int) -> wire.GenerateRequest:
        """What the worker is asked; `seed` counts where the client gave none."""
        return wire.GenerateRequest(
            request_id=request_id,
            prompt=self.prompt,
            seed=self.seed if self.seed is not None else seed,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            max_context=self.max_context,
            stop=self.stop,
            split_reasoning=self.split_reasoning,
        )


class Meta(msgspec.Struct, frozen=True):
    """What is the same in every piece of one answer."""

    id: str  # of the request, without a format's prefix
    created: int  # seconds since the epoch
    model: str  # the name the client sent, else the served id
    include_usage: bool = False


class CompletionStreamProtocol(Interface):
    """Encodes one streamed answer. After `finish` or `fail` nothing more is sent."""

    def feed(self, events: list[wire.Event]) -> bytes:
        """The frames of a batch of events that ends nothing; b"" where they show nothing."""

    def finish(self, finish: wire.Finish) -> bytes:
        """The terminal frames."""

    def fail(self, failure: Failure) -> bytes:
        """The one error frame."""


class Answer(msgspec.Struct):
    """A whole answer, gathered from its events."""

    text: str = ""
    reasoning: str = ""
    finish: wire.Finish | None = None

    def add(self, events: list[wire.Event]) -> None:
        """Take events in; `Failed` is not for an answer."""
        for event in events:
            if isinstance(event, wire.Text):
                self.text += event.text
            elif isinstance(event, wire.Reasoning):
                self.reasoning += event.text
            elif isinstance(event, wire.Finish):
                self.finish = event


class Protocol(NamedTuple):
    """One public wire format. `decode` raises `Refused`; `error` gives status, body and extra headers."""

    name: str
    path: str
    decode: Callable[[bytes], DecodedRequest]
    stream: Callable[[Meta], CompletionStreamProtocol]
    answer: Callable[[Meta, Answer], bytes]
    error: Callable[[Failure], tuple[int, bytes]]


STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.TEMPLATE_FAILED: 400,
    ErrorCode.CONTEXT_EXCEEDED: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.REQUEST_TIMEOUT: 408,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.LOADING: 503,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.UNLOADED: 503,
    ErrorCode.CONFLICT: 409,
    ErrorCode.DISK_FULL: 507,
    ErrorCode.HUB: 502,
    ErrorCode.BAD_CHECKPOINT: 503,
    ErrorCode.CANNOT_FIT: 507,
    ErrorCode.WIRE_MISMATCH: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.ENGINE_FAULT: 500,
    ErrorCode.QUARANTINED: 500,
    ErrorCode.INTERNAL: 500,
}
"""The HTTP status of each code; the same in every protocol."""


def retry_headers(failure: Failure) -> list[tuple[bytes, bytes]]:
    """`Retry-After` where trying again helps; where it cannot, a word that the official SDKs obey.

    Of a request that never came whole the rest must not be taken for the next one: its connection ends.
    """
    if failure.code is ErrorCode.REQUEST_TIMEOUT:
        return [(b"connection", b"close")]
    if failure.is_retryable:
        seconds = 1 if failure.retry_after_s is None else max(1, round(failure.retry_after_s))
        return [(b"retry-after", str(seconds).encode())]
    return [(b"x-should-retry", b"false")] if STATUS[failure.code] >= 500 else []
