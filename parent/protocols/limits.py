"""How much one request body may hold. Pure.

Decoding holds the interpreter, so a body of millions of tiny values would hold up every other request and
`/health`. What is too much is told from the bytes, before anything is built from them.
"""

from collections.abc import Iterator
from typing import Any

from shared.errors import ErrorCode, refuse

MAX_VALUES = 1_000_000  # commas: token ids, elements, fields
MAX_CONTAINERS = 100_000  # objects and lists
MAX_MESSAGES = 10_000
MAX_DEPTH = 64
MAX_SHOWN = 40

BLOCK = 1 << 16  # bytes


def check(body: bytes) -> None:
    """Raises `Refused` where the body holds too many values; nothing is said of its being JSON."""
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS and body.count(b",") <= MAX_VALUES:
        return  # nearly always
    containers = values = 0
    for piece in outside_strings(body):
        containers += piece.count(b"{") + piece.count(b"[")
        values += piece.count(b",")
        if containers > MAX_CONTAINERS or values > MAX_VALUES:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"the request body holds more than {MAX_CONTAINERS} objects and lists, or more than "
                f"{MAX_VALUES} values (such as token ids); send less at once",
            )


def outside_strings(body: bytes, block: int = BLOCK) -> Iterator[bytes]:
    """The JSON text without its strings, in pieces: text holds commas and brackets too.

    Block by block, so that no call holds the interpreter for long.
    """
    at, in_string = 0, False
    while at < len(body):
        piece = body[at : at + block]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape must not be cut in two
            piece = body[at : at + block + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether objects and lists stand more than `levels` deep in each other."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(is_too_deep(inner, levels - 1) for inner in value)


def shown(value: Any) -> str:
    """A client's value as it may stand in a message: cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:  # its digits may be more than Python prints
        return "a number of more than 40 digits"
    text = repr(value[: MAX_SHOWN + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN + 2 else f"{text[:MAX_SHOWN]}…"
