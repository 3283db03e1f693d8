"""Edits of `mlxd.toml` that keep its comments and order, and put the new file in place of the old in one step."""

import errno
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parent.values import MOST_LEVELS, bad, levels
from shared.errors import ErrorCode, Refused, refuse

REQUEST = "request"
"""The origin that errors about a patch name."""


def edited(text: str, values: dict[str, Any]) -> str:
    """The TOML text with the values set, comments and order kept; null takes a key out. Models are `models.ID`.

    Raises `Refused`: invalid_request for a value that TOML cannot hold (`param` = its key), conflict where the text
    is written in a way that the editor does not follow.
    """
    import tomllib  # here: together they cost every command 25 ms, and only a server ever edits

    import tomlkit
    import tomlkit.exceptions

    nested: dict[str, Any] = {}
    for name, value in values.items():
        _refuse_deep(name, value)
        if name.startswith("models."):
            nested.setdefault("models", {})[name.removeprefix("models.")] = value
        else:
            nested[name] = value
    try:
        wanted = _merged(tomllib.loads(text), nested)
        for anew in (False, True):
            document = tomlkit.parse(text)
            try:
                _edit(document, nested, anew=anew)
                new = tomlkit.dumps(document)
            except LookupError:  # the editor has lost its way among tables that are written apart
                continue
            new.encode()
            tomlkit.parse(new)  # or the next edit would fail
            if _meaning(tomllib.loads(new)) == _meaning(wanted):
                return new
    except (tomlkit.exceptions.TOMLKitError, ValueError, TypeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        said = f"a value cannot be written in TOML: {problem}"
        raise refuse(ErrorCode.INVALID_REQUEST, said, param=_culprit(text, values)) from None
    # Rare ways of writing tables that the editor does not follow: better no change than a wrong one.
    raise refuse(
        ErrorCode.CONFLICT,
        "the settings file is written in a way that cannot be edited here; edit it by hand",
    )


def _refuse_deep(name: str, value: Any) -> None:
    """Readers of TOML end at some depth, each at its own: what one of them has written the next must read."""
    if levels(value) <= MOST_LEVELS:
        return
    at = value
    while name.count(".") < 4 and isinstance(at, dict):  # models.ID.profiles.NAME.KEY
        key = max(at, key=lambda each: levels(at[each]))
        name, at = f"{name}.{key}", at[key]
    raise bad(name, REQUEST, f"nested more than {MOST_LEVELS} levels deep; write it flatter")


def _culprit(text: str, values: dict[str, Any]) -> str | None:
    """The key that cannot be written by itself either; None where it takes several."""
    if len(values) == 1:
        return next(iter(values))
    for name, value in values.items():
        try:
            edited(text, {name: value})
        except Refused as refused:
            if refused.failure.code is ErrorCode.INVALID_REQUEST:
                return name
    return None


_EMPTY_IS_NONE = {"profiles": 3, "template_kwargs": 5}
"""Tables of a model that say nothing when they are empty, and at which level they stand."""


def _meaning(table: Any, level: int = 0, key: str = "") -> Any:
    """Without tables that the last entry was taken out of: whether they stand there empty makes no difference.

    A profile may well be empty: it is there by its name.
    """
    if not isinstance(table, dict):
        return table
    found = {}
    for name, value in table.items():
        inner = _meaning(value, level + 1, name) if level or name == "models" else value
        says_nothing = level < 2 or _EMPTY_IS_NONE.get(name) == level + 1
        if not (inner == {} and says_nothing):
            found[name] = inner
    return found


def _merged(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in values.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = _merged(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _edit(table: MutableMapping[str, Any], values: Mapping[str, Any], *, anew: bool) -> None:
    """`anew`: a table that was emptied is written anew, for it may have stood there by its entries alone."""
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        elif isinstance(value, dict) and isinstance(table.get(key), dict):
            _edit(table[key], value, anew=anew)
            if anew and not table[key]:
                table[key] = {}
        else:
            table[key] = _merged({}, value) if isinstance(value, dict) else value


def replace(file: Path, text: str, mode: int | None = None) -> None:
    """Write beside it, then rename: the file is the old one or the new one, whatever happens. Its mode is kept, unless
    one is given.
    """
    target = Path(os.path.realpath(file))  # a link stays a link
    scratch = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode is None:
            mode = target.stat().st_mode & 0o7777 if target.exists() else 0o644
        with open(scratch, "w", encoding="utf-8", opener=_private) as out:
            out.write(text)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        scratch.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _cannot_write(target, error) from None
    finally:
        with suppress(OSError):
            scratch.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(file: Path, error: OSError) -> Refused:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = ErrorCode.DISK_FULL if full else ErrorCode.CONFLICT
    return refuse(code, f"cannot write {file}: {error.strerror or error}; nothing is changed")
