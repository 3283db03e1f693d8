"""Small JSON bodies of routes that are our own; those of the protocols have a reading of theirs."""

from typing import TypeVar

import msgspec

from shared import asgi
from shared.errors import ErrorCode, refuse

T = TypeVar("T")


async def read_json(
    receive: asgi.Receive,
    kind: type[T],
    most_bytes: int,
    *,
    silence_s: float,
    shape: str = "",
    nothing: bytes = b"{}",
) -> T:
    """The body as `kind`; `nothing` stands for none. `shape`: what it must be, for the message.

    Raises `Refused` (invalid_request, too_large, request_timeout).
    """
    body = await asgi.read_body(receive, most_bytes, silence_s=silence_s)
    try:
        return msgspec.json.decode(body.strip() or nothing, type=kind)
    except RecursionError:
        problem = "objects and lists stand too deep in each other"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = str(error)
    said = f"the body must be {shape} ({problem})" if shape else f"the request body: {problem}"
    raise refuse(ErrorCode.INVALID_REQUEST, said)
