"""Tools that take free text: to the model each is a function with one string, `input`. Pure.

The text is taken out of the JSON while it is written. Arguments that are something else are the text as they are, and
what is no right escape stands as the model wrote it.
"""

from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_OPENING = ("{", '"input"', ":", '"')
_SPACES = " \t\r\n"
_ESCAPES = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"
}  # fmt: skip
_LONGEST = 12  # of an escape: \ud83d\ude00


class CustomInput:
    """Reads arguments as they come; the text it gives does not depend on how they were cut."""

    def __init__(self) -> None:
        self._rest = ""
        self._where = "before"  # the text, in it, after it, or the arguments are the text ("raw")

    def feed(self, piece: str) -> str:
        """More of the arguments; what they add to the text."""
        if self._where == "raw":
            return piece
        if self._where == "after":
            return ""
        self._rest += piece
        if self._where == "before":
            at = _opened_at(self._rest)
            if at == 0:
                return ""
            if at < 0:
                self._where = "raw"
                return self._all()
            self._where, self._rest = "inside", self._rest[at:]
        return self._inside(is_last=False)

    def end(self) -> str:
        """The arguments are over; what was not sure yet. Half an escape is nothing."""
        if self._where == "before":
            return self._all()
        return self._inside(is_last=True) if self._where == "inside" else ""

    def _all(self) -> str:
        rest, self._rest = self._rest, ""
        return rest

    def _inside(self, *, is_last: bool) -> str:
        text, at, rest = [], 0, self._rest
        while at < len(rest):
            stop = min((place for mark in '"\\' if (place := rest.find(mark, at)) >= 0), default=len(rest))
            text.append(rest[at:stop])
            at = stop
            if at == len(rest):
                break
            if rest[at] == '"':
                self._where, at = "after", len(rest)
                break
            meant, length = _escape(rest[at : at + _LONGEST], is_last=is_last)
            if not length:
                break
            text.append(meant)
            at += length
        self._rest = rest[at:]
        return "".join(text)


def _opened_at(text: str) -> int:
    """Where the string begins; 0: not yet, -1: the arguments are no object that begins with `input`."""
    at = 0
    for token in _OPENING:
        while at < len(text) and text[at] in _SPACES:
            at += 1
        part = text[at : at + len(token)]
        if not token.startswith(part):
            return -1
        if len(part) < len(token):
            return 0
        at += len(token)
    return at


def _escape(text: str, *, is_last: bool) -> tuple[str, int]:
    """What an escape at the beginning of `text` means, and its length; 0: it may go on."""
    if len(text) < 2:
        return "", 0
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[:2]), 2
    code = _hex(text[2:6])
    if code is None:
        return (text[:2], 2) if len(text) >= 6 or not _may_be_hex(text[2:]) else ("", 0)
    if not 0xD800 <= code < 0xE000:
        return chr(code), 6
    if code >= 0xDC00:
        return "\ufffd", 6
    follows = text[6:12]
    low = _hex(follows[2:]) if follows.startswith("\\u") else None
    if low is not None and 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12
    goes_on = len(follows) < 6 and "\\u".startswith(follows[:2]) and _may_be_hex(follows[2:])
    return ("", 0) if goes_on and not is_last else ("\ufffd", 6)


def _hex(digits: str) -> int | None:
    return int(digits, 16) if len(digits) == 4 and _may_be_hex(digits) else None


def _may_be_hex(digits: str) -> bool:
    return all(each in "0123456789abcdefABCDEF" for each in digits)
