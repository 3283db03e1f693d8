"""Failures in the shape of Ollama's API: `{"error": "…"}`. Pure."""

import msgspec

from parent.protocols import base
from shared.errors import Failure


class ErrorBody(msgspec.Struct, frozen=True):
    """What every failure looks like to an Ollama client, in a stream too."""

    error: str


def error(failure: Failure, request_id: str = "") -> tuple[int, bytes]:
    """Status and body of a failure before any header has left."""
    return base.STATUS[failure.code], msgspec.json.encode(ErrorBody(failure.message))
