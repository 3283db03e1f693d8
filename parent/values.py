"""How the value of a setting is described, read from text or TOML, checked, and shown again. Pure.

A setting is a field of a frozen Struct. Its `Meta` carries its bounds, what it is for, and (`extra`) the unit
in which people write it, the words it may be, and what a change of it needs to be in force.
"""

import difflib
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Meta

from shared.errors import ErrorCode, Refused, refuse
from shared.units import parse_bytes, parse_seconds

Needs = Literal["nothing", "model reload", "restart"]


class Field(msgspec.Struct, frozen=True):
    """What is known of one setting apart from its value."""

    name: str
    type: Any  # the annotated type, for validation
    default: Any  # None for `data_dir`, which depends on the home folder
    description: str
    unit: str = ""  # "bytes", "seconds" or ""
    choices: tuple[str, ...] = ()
    needs: Needs = "nothing"  # before a changed value is in force
    zero_is_never: bool = False  # of a duration
    also: str = ""  # another flag for it, as other servers call it

    @property
    def flag(self) -> str:
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def flags(self) -> list[str]:
        return [self.flag, self.also] if self.also else [self.flag]

    @property
    def variable(self) -> str:
        return "MLXD_" + self.name.upper()


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """Every field of a Struct of settings by name, in its order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    found = {}
    for info in msgspec.structs.fields(struct):
        meta = _meta_of(hints[info.name])
        default = info.default
        if default is msgspec.NODEFAULT:
            default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else None
        extra = meta.extra or {}
        found[info.name] = Field(
            info.name,
            hints[info.name],
            default,
            meta.description or "",
            extra.get("unit", ""),
            tuple(extra.get("choices", ())),
            extra.get("needs", "nothing"),
            extra.get("zero_is_never", False),
            extra.get("also", ""),
        )
    return found


def _meta_of(hint: Any) -> Meta:
    """The `Meta` of `Annotated[T, Meta]`, or of that in a union with None."""
    for part in (hint, *typing.get_args(hint)):
        if found := [each for each in getattr(part, "__metadata__", ()) if isinstance(each, Meta)]:
            return found[0]
    return Meta()


def _kind_of(hint: Any) -> Any:
    """`int` of `Annotated[int, …] | None`; the first type of any other union."""
    while typing.get_args(hint):
        origin = typing.get_origin(hint)
        if origin in (list, dict):
            return origin
        hint = typing.get_args(hint)[0]
    return hint


MOST_LEVELS = 32
"""Of tables and lists in one another, in one value."""


def levels(value: Any) -> int:
    """How deep tables and lists are nested in a value; 0 for one that is neither."""
    deepest, open_ends = 0, [(value, 0)]
    while open_ends:  # a call for each level would end at Python's own limit
        each, level = open_ends.pop()
        deepest = max(deepest, level)
        inner = each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else None
        if inner is not None:
            deepest = max(deepest, level + 1)
            open_ends.extend((one, level + 1) for one in inner)
    return deepest


def checked(known: Field, value: Any, origin: str, name: str = "") -> Any:
    """The value in its field's type, whether it came as text or from TOML or JSON.

    Raises `Refused` (invalid_request, `param` = the setting) with `name` ("" = the field's) and `origin`.
    """
    name = name or known.name
    if isinstance(value, str):
        value = _from_text(known, value, origin, name)
    elif _kind_of(known.type) is float and isinstance(value, int) and not isinstance(value, bool):
        value = _as_float(value)
    if levels(value) > MOST_LEVELS:
        raise bad(name, origin, f"nested more than {MOST_LEVELS} levels deep; write it flatter")
    if known.unit == "seconds" and isinstance(value, int | float) and value < 0:
        raise bad(name, origin, f"{value}: {_no_end(known)}")
    if known.choices and value is not None and value not in known.choices:
        raise bad(name, origin, f"{value!r} is not one of {', '.join(known.choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise bad(name, origin, f"{value} is not a number to count with")
    try:
        return msgspec.convert(value, known.type, dec_hook=as_path)
    except msgspec.ValidationError as error:
        problem = str(error)
        for theirs, ours in _WORDS.items():
            problem = problem.replace(theirs, ours)
        raise bad(name, origin, f"{problem[:1].lower()}{problem[1:]}") from None


_WORDS = {
    " | null": "",  # of a type in the message: nobody can write null in TOML
    "`int`": "a whole number",
    "`float`": "a number",
    "`int": "a whole number`",
    "`bool`": "true or false",
    "`object`": "a table",
}


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _from_text(known: Field, text: str, origin: str, name: str) -> Any:
    """Flags and variables are text; so are sizes and durations as people write them in the file."""
    parsers: dict[str, Callable[[str], Any]] = {"bytes": parse_bytes, "seconds": partial(_duration, known)}
    parse = parsers.get(known.unit, _plain(known))
    try:
        return parse(text)
    except (ValueError, OverflowError) as error:
        raise bad(name, origin, str(error)) from None


def _duration(known: Field, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError:
        or_never = ", or 0 for never" if known.zero_is_never else ""
        raise ValueError(f"{text!r} is not a duration; write for example 30s, 5m or 2h{or_never}") from None
    if seconds is None:
        raise ValueError(f"{text!r}: {_no_end(known)}")
    return seconds


def _no_end(known: Field) -> str:
    if known.zero_is_never:
        return "write 0 for never"
    return "this duration must have an end; write one above 0, for example 30s or 5m"


def _true_or_false(text: str) -> bool:
    words = {"true": True, "false": False}
    if text.strip().lower() not in words:
        raise ValueError(f"expected true or false, not {text!r}")
    return words[text.strip().lower()]


def _plain(known: Field) -> Callable[[str], Any]:
    kind = _kind_of(known.type)
    if kind is int:
        return _whole_number
    if kind is bool:
        return _true_or_false
    if kind is list:
        return lambda text: [part.strip() for part in text.split(",") if part.strip()]
    return str


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def as_path(kind: type, value: Any) -> Any:
    """msgspec's hook for paths: absolute, `~` expanded. Raises ValueError."""
    if kind is Path and isinstance(value, str) and value and "\0" not in value:
        try:
            return Path(value).expanduser().absolute()
        except RuntimeError as error:  # ~somebody who is not here
            raise ValueError(f"{value!r}: {error}") from None
    raise ValueError("expected the path of a folder")


def bad(name: str, origin: str, problem: str) -> Refused:
    """`setting port (MLXD_PORT): 'x' is not a whole number`"""
    return refuse(ErrorCode.INVALID_REQUEST, f"setting {name} ({origin}): {problem}", param=name)


def near(word: str, known: Iterable[str], otherwise: str) -> str:
    """What to say after an unknown word: the one that was probably meant, else `otherwise`."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else f"; {otherwise}"


def as_written(known: Field, value: Any) -> str:
    """A value as a person writes it, without rounding; "" for nothing."""
    if known.unit == "bytes":
        return _in_unit(value, _SIZES) or f"{value} B"
    if known.unit == "seconds":
        return _in_unit(value, _TIMES) or f"{value!r}".removesuffix(".0") + "s"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


_SIZES = {" GiB": 1 << 30, " GB": 10**9, " MiB": 1 << 20, " MB": 10**6, " KiB": 1 << 10, " kB": 1000}
_TIMES = {"d": 86400, "h": 3600, "m": 60}


def _in_unit(value: float, units: Mapping[str, int]) -> str:
    for unit, size in units.items():
        if value >= size and value % size == 0:
            return f"{int(value // size)}{unit}"
    return ""
