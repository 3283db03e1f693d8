"""Fields that nobody knows, refused by name where the server is strict. Pure."""

import difflib
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, get_args

import msgspec

from parent.protocols.limits import MAX_SHOWN
from parent.protocols.refusing import invalid


def refuse_unknown(
    value: Any, kind: type[msgspec.Struct], ignored: Collection[str] = (), where: str = ""
) -> None:
    """Raises `Refused` for the first field of `value`, or of an object in it whose fields are known, that is none.

    `ignored`: names that are fine beside those of `kind`.
    """
    known = _known(kind)
    for name, inner in value.items():
        if name in known:
            for inner_kind in known[name]:
                for place, each in _objects(inner, f"{where}{name}"):
                    refuse_unknown(each, inner_kind, (), f"{place}.")
        elif name not in ignored:
            near = difflib.get_close_matches(name[:MAX_SHOWN], [*known, *ignored], 1)
            hint = f"did you mean {near[0]}?" if near else "leave it out, or serve without --strict"
            raise invalid(f"{where}{name[:MAX_SHOWN]}", f"this field is not known here; {hint}")


@cache
def _known(kind: type[msgspec.Struct]) -> dict[str, list[type[msgspec.Struct]]]:
    """Its fields, and of each the objects that may stand in it."""
    return {field.encode_name: list(_structs(field.type)) for field in msgspec.structs.fields(kind)}


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in get_args(kind):
        yield from _structs(inner)


def _objects(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield where, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _objects(inner, f"{where}[{index}]")
