"""Texts as people and models write them: lines, paragraphs, lists, blocks of code. Pure."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_BULLET = re.compile(r"^\s*(?:[-*•–]|\(?\d{1,3}[.):]|[a-zA-Z][.)])\s+")
_QUOTES = {'"': '"', "'": "'", "“": "”", "«": "»", "`": "`"}
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)


class Piece(NamedTuple):
    """A part of a text, and the line, from 1, where it begins."""

    line: int
    text: str


def lines(text: str) -> list[Piece]:
    """Those with something in them."""
    return [Piece(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def paragraphs(text: str) -> list[Piece]:
    """What stands between empty lines."""
    return list(_blocks(text, lambda line: not line.strip()))


def sections(text: str) -> list[Piece]:
    """What stands between lines of ---."""
    return list(_blocks(text, lambda line: bool(re.fullmatch(r"\s*-{3,}\s*", line))))


def _blocks(text: str, is_border: Callable[[str], bool]) -> Iterator[Piece]:
    begin, held = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), None], 1):
        if line is not None and not is_border(line):
            held.append(line)
            continue
        inside = "\n".join(held)
        if inside.strip():
            blank = len(held) - len("\n".join(held).lstrip("\n").splitlines())
            yield Piece(begin + blank, inside.strip())
        begin, held = number + 1, []


def listed(text: str) -> list[str]:
    """The items of a list that a model wrote: JSON, bullets, numbers, or plain lines; a line that leads in is none."""
    begin, end = text.find("["), text.rfind("]")
    if 0 <= begin < end:
        try:
            found = json.loads(text[begin : end + 1])
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list):
            items = [item for each in found if (item := _item_of(each))]
            if items:
                return items
    rows = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("```")]
    marked = [line for line in rows if _BULLET.match(line)]
    if marked:
        rows = marked
    elif len(rows) > 1 and rows[0].rstrip().endswith(":"):
        rows = rows[1:]
    return [item for line in rows if (item := _unquoted(_BULLET.sub("", line)))]


def _item_of(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, dict):  # {"instruction": "…"}
        return next((one.strip() for one in value.values() if isinstance(one, str) and one.strip()), "")
    return ""


def _unquoted(text: str) -> str:
    text = text.strip().rstrip(",").strip()
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    return text


def code_blocks(text: str) -> list[str]:
    """What stands between fences; a last one may be open."""
    return [found[2].strip("\n") for found in _FENCE.finditer(text) if found[2].strip()]


def names(text: str) -> list[str]:
    """Words with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]
