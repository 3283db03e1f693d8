"""Logs: one JSON object a line, with the ids of the request and worker it speaks of.

`bind(request_id=…)` sets ids for everything logged in the same context (task); a call adds its own fields
with `extra={"fields": {...}}` through `event(...)`.
"""

import contextvars
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

_ids: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("log_ids", default=None)


@contextmanager
def bind(**ids: Any) -> Iterator[None]:
    """Add ids to every line logged inside the block."""
    token = _ids.set({**(_ids.get() or {}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def event(log: logging.Logger, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one fact: a name in glossary words and the numbers that belong to it."""
    log.log(level, name, extra={"fields": {**(_ids.get() or {}), **fields}})


class JsonLines(logging.Formatter):
    """`{"ts":…,"level":…,"logger":…,"event":…,…fields}`"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class Plain(logging.Formatter):
    """The same for a person at a terminal: `12:00:01 worker.ready model=starter seconds=0.61`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        line = f"{clock} {level}{record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(level: str = "info", *, json: bool | None = None) -> None:
    """Send the root logger to stderr. `json=None`: plain on a terminal, JSON lines elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = not sys.stderr.isatty() if json is None else json
    handler.setFormatter(JsonLines() if as_json else Plain())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
