"""Failures in the shape of Anthropic's API. Pure."""

import msgspec

from parent.protocols import base
from shared.errors import RETRYABLE, ErrorCode, Failure

OVERLOADED = 529

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """The inside of an error."""

    type: str
    message: str


class ErrorFrame(msgspec.Struct, frozen=True, tag="error", omit_defaults=True):
    """What every failure looks like to an Anthropic client."""

    error: ErrorBody
    request_id: str = ""


def error_frame(failure: Failure, request_id: str = "", status: int | None = None) -> ErrorFrame:
    """A failure under the type that its status has; `status` where it is not that of the code."""
    kind = _TYPES.get(status or status_of(failure), "api_error")
    return ErrorFrame(ErrorBody(kind, _message(failure)), request_id)


def error(failure: Failure, request_id: str = "", status: int | None = None) -> tuple[int, bytes]:
    """Status and body of a failure before any header has left."""
    frame = error_frame(failure, request_id, status)
    return status or status_of(failure), msgspec.json.encode(frame)


def status_of(failure: Failure) -> int:
    """As for everybody, but for what will pass (529), and a prompt that is too long for memory (400)."""
    if failure.most_tokens is not None:
        return 400
    if failure.code in RETRYABLE and failure.code is not ErrorCode.QUEUE_FULL:
        return OVERLOADED
    return base.STATUS[failure.code]


def _message(failure: Failure) -> str:
    """Of a prompt that is too long in the words by which clients know that they have to shorten it."""
    if failure.tokens is None or failure.most_tokens is None:
        return failure.message
    over = failure.tokens - failure.most_tokens
    return (
        f"prompt is too long: {failure.tokens} tokens > {failure.most_tokens} maximum; "
        f"shorten it by at least {over} tokens"
    )
