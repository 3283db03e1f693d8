"""What a worker logs, said again in the server's log: with the model's or job's id and the worker's pid.

A worker writes its log as JSON lines to its output (`shared.logs`); what else it prints is kept for the report of its
end alone. A worker that floods its log is heard `MOST_LINES` times a level in `WINDOW_S`, so that a warning is not lost
among facts; how many more there were is said.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from shared.files import decode_json
from shared.logs import event

log = logging.getLogger(__name__)

MAX_LINE = 1 << 16
"""Bytes of one line of a worker's log; of a longer one the beginning is told."""

MOST_LINES = 100
WINDOW_S = 10.0

_BEGINNING = re.compile(rb'\{"ts":[0-9.e+]+,"level":"(debug|info|warning|error|critical)",')
_TOLD = 200  # characters of a line that cannot be taken whole


class Lines:
    """Output in lines, however it came in pieces; what a line has beyond `MAX_LINE` bytes and one is left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole now."""
        *whole, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[: MAX_LINE + 1]
        return [line[: MAX_LINE + 1] for line in whole]

    def end(self) -> list[bytes]:
        """The last line, where no newline ends it."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Relay:
    """The log of one process. `clean`: what every text in it has to pass. One thread at a time."""

    def __init__(self, ids: dict[str, Any], clean: Callable[[str], str] = str) -> None:
        self._ids, self._clean = ids, clean
        self._window_ends = 0.0
        self._said: Counter[str] = Counter()  # lines in this window, by level
        self._dropped = 0

    def take(self, line: bytes, now: float) -> bool:
        """Say a line of the worker's output again. False: it is none of its log."""
        found = _BEGINNING.match(line)
        if found is None:
            return False
        if now >= self._window_ends:
            self.tell_dropped()
            self._window_ends = now + WINDOW_S
            self._said.clear()
        level = found[1].decode()
        self._said[level] += 1
        if self._said[level] <= MOST_LINES:
            self._say(level, line)
            return True
        if not self._dropped:
            event(
                log,
                "worker.log_floods",
                level=logging.WARNING,
                **self._ids,
                lines=MOST_LINES,
                of_level=level,
                within_s=WINDOW_S,
            )
        self._dropped += 1
        return True

    def tell_dropped(self) -> None:
        """How many lines were passed over, if any; at the end of a window, and of the output."""
        if self._dropped:
            event(log, "worker.log_dropped", level=logging.WARNING, **self._ids, lines=self._dropped)
        self._dropped = 0

    def _say(self, level: str, line: bytes) -> None:
        number = logging.getLevelNamesMapping()[level.upper()]
        try:
            if len(line) > MAX_LINE:
                raise ValueError(f"it is longer than {MAX_LINE} bytes")
            said = decode_json(line)
            name, logger = str(said.pop("event")), str(said.pop("logger"))
        except (ValueError, KeyError) as error:  # something else was printed into it
            begins = self._clean(line[:_TOLD].decode("utf-8", "replace"))
            event(log, "worker.log_line", level=number, **self._ids, begins=begins, reason=str(error))
            return
        fields = {key: self._cleaned(value) for key, value in said.items() if key not in ("ts", "level")}
        logging.getLogger(f"worker.{logger}").log(
            number, self._clean(name), extra={"fields": {**self._ids, **fields, **self._ids}}
        )

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, list | dict):
            value = msgspec.json.encode(value).decode()
        return self._clean(value) if isinstance(value, str) else value
