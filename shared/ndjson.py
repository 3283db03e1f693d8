"""NDJSON: bytes to lines and messages to bytes, incrementally and with a bounded line length. No IO."""

from typing import Any

import msgspec

MAX_LINE = 64 * 1024 * 1024
"""Bytes in one line; a resumed request carries its prompt and ids, so this is generous."""

_encoder = msgspec.json.Encoder()


class LineTooLong(Exception):
    """The peer sent more than the allowed bytes without a newline."""


def encode(message: Any) -> bytes:
    """One message as one line, newline included."""
    return _encoder.encode(message) + b"\n"


class Lines:
    """Cuts a byte stream into lines: `feed(chunk)` gives the whole lines so far, without newlines."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._parts: list[bytes] = []
        self._held = 0
        self._max = max_line

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises `LineTooLong` when a line outgrows the bound, however it was cut into chunks."""
        head, newline, rest = chunk.partition(b"\n")
        self._held += len(head)
        if self._held > self._max:
            raise LineTooLong(f"a line is longer than {self._max} bytes")
        self._parts.append(head)
        if not newline:
            return []
        lines = [b"".join(self._parts)]
        *whole, tail = rest.split(b"\n")
        if any(len(line) > self._max for line in (*whole, tail)):
            raise LineTooLong(f"a line is longer than {self._max} bytes")
        lines += whole
        self._parts, self._held = [tail], len(tail)
        return lines
