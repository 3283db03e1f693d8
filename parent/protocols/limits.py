"""How much one request body may hold. Pure.

Decoding holds the interpreter, so a body of millions of tiny values would hold up every other request and
`/health`. What is too much is told from the bytes, before anything is built from them.
"""

import re
from typing import Any

from shared.errors import ErrorCode, refuse

MAX_VALUES = 1_000_000  # commas: token ids, elements, fields
MAX_CONTAINERS = 100_000  # objects and lists
MAX_MESSAGES = 10_000
MAX_DEPTH = 64
MAX_SHOWN = 40

_MARKS = re.compile(rb'\\.|["{\[,]', re.DOTALL)


def check(body: bytes) -> None:
    """Raises `Refused` where the body holds too many values; nothing is said of its being JSON."""
    containers = body.count(b"{") + body.count(b"[")
    if containers <= MAX_CONTAINERS and body.count(b",") <= MAX_VALUES:  # nearly always
        return
    containers = values = 0
    in_string = False
    # Text holds these characters too. Each match is short, so that other threads get their turn.
    for found in _MARKS.finditer(body):
        mark = found[0]
        if mark == b'"':
            in_string = not in_string
        elif in_string or mark[0] == 0x5C:  # a backslash
            continue
        elif mark == b",":
            values += 1
        else:
            containers += 1
        if containers > MAX_CONTAINERS or values > MAX_VALUES:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"the request body holds more than {MAX_CONTAINERS} objects and lists, or more than "
                f"{MAX_VALUES} values (such as token ids); send less at once",
            )


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
