"""The configuration of a running server: read again on demand, and changed in `mlxd.toml` with its comments kept.

A change is all or nothing: the new file is checked whole before it replaces the old one. Settings that need a
restart keep the value they had at the start (`pending` names them); all others are in force at once.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from parent.config import Resolved, Settings, fields, load_settings, near_setting, parse_file, read_text
from parent.model_options import ModelOptions
from parent.settings_file import REQUEST, edited, replace
from parent.values import Needs, bad, checked, fields_of


class Change(msgspec.Struct, frozen=True):
    """What a new look at the file brought: names of settings and ids of models whose value is another now.

    `pending`: settings (some of `settings`) whose new value waits for a restart.
    """

    settings: list[str] = []
    models: list[str] = []
    pending: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.settings or self.models)


class PatchResult(msgspec.Struct, frozen=True):
    """One value of a patch. `effective`: what is in force now, which `note` explains where it is another."""

    name: str
    value: Any
    effective: Any
    origin: str
    needs: Needs
    note: str = ""


class LiveConfig:
    """`settings`, `models` and `origins` as they are in force. Raises `Refused` where they cannot be read.

    `flags`: settings by name, as `load_settings` takes them. `on_change` is called after every reload that
    changed something, in the thread that reloaded.
    """

    def __init__(self, flags: Mapping[str, str], environ: Mapping[str, str], *, home: Path) -> None:
        self._flags, self._environ, self._home = dict(flags), dict(environ), home
        self._writing = threading.Lock()
        self._resolved = self._load()
        self._settings = self._resolved.settings
        self.on_change: list[Callable[[Change], None]] = []
        self.checks: list[
            Callable[[Resolved], None]
        ] = []  # raise `Refused` for what must not come into force

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def models(self) -> dict[str, ModelOptions]:
        return self._resolved.models

    @property
    def notes(self) -> list[str]:
        """What looks like a mistake and is none for certain."""
        return self._resolved.notes

    @property
    def origins(self) -> dict[str, str]:
        return self._resolved.origins

    @property
    def file(self) -> Path:
        """The settings file, whether it exists or not."""
        return self._resolved.config_file

    @property
    def pending(self) -> dict[str, Any]:
        """Settings whose new value waits for a restart, with that value."""
        new = self._resolved.settings
        return {
            name: getattr(new, name)
            for name in fields()
            if getattr(new, name) != getattr(self._settings, name)
        }

    def reload(self) -> Change:
        """Read the file again. Raises `Refused`, everything staying as it was, where it is broken."""
        before, after = self._resolved, self._load()
        self._check(after)
        changed = [
            name for name in fields() if getattr(before.settings, name) != getattr(after.settings, name)
        ]
        ids = sorted({*before.models, *after.models})
        models = [each for each in ids if before.models.get(each) != after.models.get(each)]
        kept = {
            name: getattr(self._settings, name)
            for name, known in fields().items()
            if known.needs == "restart"
        }
        self._resolved = after
        self._settings = msgspec.structs.replace(after.settings, **kept)
        change = Change(changed, models, [name for name in changed if name in kept])
        if change:
            for tell in list(self.on_change):
                tell(change)
        return change

    def patch(self, values: dict[str, Any]) -> list[PatchResult]:
        """Write settings by name and `models.ID` tables into the file, and take them over.

        A table is merged key by key; null removes a key. Raises `Refused` (`param` = the key at fault), and
        nothing is written, where one value is wrong.
        """
        self.write(values)
        self.reload()
        return self.results(values)

    def write(self, values: dict[str, Any]) -> None:
        """The first half of `patch`: check and write the file. May be called in a thread."""
        values = _flat(values)
        with self._writing:
            file = self.file
            old = read_text(file) if os.path.lexists(file) else ""
            parse_file(old, file)
            for name, value in values.items():
                if name in fields() and value is not None:
                    checked(fields()[name], value, REQUEST)
                elif name not in fields() and not name.startswith("models."):
                    raise bad(name, REQUEST, f"there is no such setting{near_setting(name)}")
            new = edited(old, values)
            self._check(self._load(new))  # all of it, the flags over it: what would not start is not written
            if new != old:
                replace(file, new)

    def results(self, values: dict[str, Any]) -> list[PatchResult]:
        """What became of each value once the file has been read again."""
        found = []
        for name, value in _flat(values).items():
            if name.startswith("models."):
                model_id = name.removeprefix("models.")
                options = self.models.get(model_id)
                effective = None if options is None else msgspec.to_builtins(options)
                found.append(PatchResult(name, value, effective, str(self.file), _model_needs(value)))
            else:
                found.append(self._result(name, value))
        return found

    def _result(self, name: str, value: Any) -> PatchResult:
        origin, needs = self.origins[name], fields()[name].needs
        effective = msgspec.to_builtins(getattr(self._settings, name), enc_hook=str)
        if origin.startswith(("flag ", "MLXD_")):
            note = f"{origin} wins over the file; start the server without it"
            return PatchResult(name, value, effective, origin, "restart", note)
        if needs == "restart" and name not in self.pending:
            needs = "nothing"
        note = "in force after a restart" if needs == "restart" else ""
        return PatchResult(name, value, effective, origin, needs, note)

    def _check(self, resolved: Resolved) -> None:
        for check in self.checks:
            check(resolved)

    def _load(self, text: str | None = None) -> Resolved:
        return load_settings(self._flags, self._environ, home=self._home, text=text)


def _model_needs(value: dict[str, Any] | None) -> Needs:
    """A model's options without a reload are its names, its pin, its idle time and its profiles."""
    known = fields_of(ModelOptions)
    touched = known if value is None else value
    return "model reload" if any(known[key].needs == "model reload" for key in touched) else "nothing"


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """`{"models": {ID: table}}` as `{"models.ID": table}`, which is how it may be written too."""
    flat = {name: value for name, value in values.items() if name != "models"}
    models = values.get("models", {})
    if not isinstance(models, dict):
        raise bad("models", REQUEST, "expected an object of models")
    flat.update((f"models.{model_id}", table) for model_id, table in models.items())
    for name, table in flat.items():
        if name.startswith("models.") and table is not None and not isinstance(table, dict):
            raise bad(name, REQUEST, "expected an object, or null to remove it")
    return flat
