"""How a client's name finds a model, and what serves a name that nobody has, where that was opted for. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parent.library.adapters import Shelved
from parent.library.catalog import ModelEntry
from parent.library.names import Found
from parent.model_options import Profile
from shared.errors import ErrorCode, Refused, refuse

RESIDENT = "resident"


class Choice(NamedTuple):
    """The model of a request. `is_fallback`: not the one that was asked for. `adapters`: as in `Found`."""

    entry: ModelEntry
    profile: Profile | None = None
    is_fallback: bool = False
    adapters: tuple[Shelved, ...] | None = None


def choose(
    name: str,
    resolve: Callable[[str], Found],
    *,
    default: str,
    fallback: str,
    residents: Sequence[ModelEntry],
) -> Choice:
    """The model of this name; "" means the default. Raises `Refused` (model_not_found) with near matches.

    `fallback` "" = none; `resident` = the last used of `residents`, else the default; else a model's name. Either
    prefers a resident model over loading one.
    """
    asked = name or default
    if not asked:
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND,
            "the request names no model, and there is no default here",
            param="model",
        )
    try:
        found = resolve(asked)
    except Refused as unknown:
        if not fallback or unknown.failure.code is not ErrorCode.MODEL_NOT_FOUND:
            raise
        if residents:
            return Choice(residents[0], None, is_fallback=True)
        if fallback == RESIDENT and not default:
            raise
        try:
            found = resolve(default if fallback == RESIDENT else fallback)
        except Refused:
            raise unknown from None  # what was asked for is what the client knows of
        return Choice(found.entry, found.profile, is_fallback=True)
    return Choice(found.entry, found.profile, adapters=found.adapters)
