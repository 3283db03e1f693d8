"""The one failure type of every wire, and what each code means.

A `Failure` is a value: it travels from the worker to the parent and is rendered by a protocol in its own
shape and status. `Refused` carries one through Python code until somebody can act on it.
"""

from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """What went wrong, in the words of this project; protocols map each to a status and a type."""

    INVALID_REQUEST = "invalid_request"  # the client's request is wrong; `param` names the field
    TEMPLATE_FAILED = "template_failed"  # the model's chat template refused the messages
    CONTEXT_EXCEEDED = "context_exceeded"  # prompt longer than the context window
    TOO_LARGE = "too_large"  # request body over the limit
    REQUEST_TIMEOUT = "request_timeout"  # the client stopped in the middle of its request
    MODEL_NOT_FOUND = "model_not_found"  # no model of that name here
    NOT_FOUND = "not_found"  # no such route or object
    UNAUTHORIZED = "unauthorized"  # no key, or not one of this server's
    FORBIDDEN = "forbidden"  # Host, Origin or Sec-Fetch-Site policy
    UNSUPPORTED = "unsupported"  # a feature or family this server does not have
    BAD_CHECKPOINT = "bad_checkpoint"  # the model directory cannot be loaded as it is
    CANNOT_FIT = "cannot_fit"  # the model or the request does not fit in memory
    LOADING = "loading"  # the model is still loading and the wait bound is over
    QUEUE_FULL = "queue_full"  # too many requests wait already
    ENGINE_UNAVAILABLE = "engine_unavailable"  # the worker died or is restarting
    ENGINE_FAULT = "engine_fault"  # the engine raised while it ran this request
    SHUTTING_DOWN = "shutting_down"  # the server is draining
    UNLOADED = "unloaded"  # an operator unloaded the model without waiting for its answers
    CONFLICT = "conflict"  # the state of things forbids it just now; the message says which
    DISK_FULL = "disk_full"  # not enough room on the disk, the floor that stays free included
    HUB = "hub"  # the model hub cannot be reached, or refused
    QUARANTINED = "quarantined"  # this very request was in flight at two worker deaths
    DEADLINE = "deadline"  # the request's own deadline is over
    WIRE_MISMATCH = "wire_mismatch"  # parent and worker are of different versions
    INTERNAL = "internal"  # a bug here


RETRYABLE = frozenset(
    {
        ErrorCode.LOADING,
        ErrorCode.QUEUE_FULL,
        ErrorCode.ENGINE_UNAVAILABLE,
        ErrorCode.SHUTTING_DOWN,
    }
)

# A worker that fails with one of these is not restarted: the next start would fail in the same way.
PERMANENT = frozenset(
    {ErrorCode.BAD_CHECKPOINT, ErrorCode.CANNOT_FIT, ErrorCode.UNSUPPORTED, ErrorCode.WIRE_MISMATCH}
)


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failure: a code, one line that says what is wrong, where, and what to do.

    `param` names the request field at fault; `retry_after_s` is a hint for a `Retry-After` header. Of a prompt that is
    too long `tokens` has its length (at least) and `most_tokens` what could be answered.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    tokens: int | None = None
    most_tokens: int | None = None

    @property
    def is_retryable(self) -> bool:
        return self.code in RETRYABLE

    @property
    def is_permanent(self) -> bool:
        return self.code in PERMANENT


class Refused(Exception):
    """Carries a `Failure` up to whoever can answer it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refuse(
    code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> Refused:
    """Build the exception to raise: `raise refuse(ErrorCode.INVALID_REQUEST, "…", param="top_p")`."""
    return Refused(Failure(code, message, param, retry_after_s))
