"""What of a job worker's output is fit to be shown and kept. Pure.

A download is redirected to addresses that are signed: whoever has one may fetch the file, so what comes after the
path of an address is left out of every error, which end up in the database, in answers and in logs.
"""

import re
from collections.abc import Iterable

import msgspec

from shared.errors import Failure

_SECRET_PART = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]*")
_LOG_LINE = '{"ts":'  # how `shared.logs.JsonLines` begins every line


def without_queries(text: str) -> str:
    """The text with every address in it cut behind its path."""
    return _SECRET_PART.sub(r"\1", text)


def shown(failure: Failure) -> Failure:
    """The failure as it may be kept."""
    return msgspec.structs.replace(failure, message=without_queries(failure.message))


def last_words(lines: Iterable[str]) -> str:
    """The last line that is no log line of ours; "" without one."""
    plain = [line for line in lines if line.strip() and not line.startswith(_LOG_LINE)]
    return without_queries(plain[-1]) if plain else ""
