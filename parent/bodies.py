"""Small JSON bodies of routes that are our own; those of the protocols have a reading of theirs."""

from typing import TypeVar

from shared import asgi
from shared.errors import ErrorCode, refuse
from shared.files import decode_json

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
        found: T = decode_json(body.strip() or nothing, kind)
        return found
    except ValueError as error:
        said = f"the body must be {shape} ({error})" if shape else f"the request body: {error}"
        raise refuse(ErrorCode.INVALID_REQUEST, said) from None
