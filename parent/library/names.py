"""Who is meant by a name: ids, aliases, `NAME:PROFILE`, `NAME:ADAPTER`, `NAME@REVISION`, and the end of an id where
only one has it.

Pure.
"""

import difflib
import re
from collections.abc import Callable, Mapping

import msgspec

from parent.library.adapters import Shelved, parsed
from parent.library.catalog import ModelEntry
from parent.model_options import ModelOptions, Profile
from shared.errors import ErrorCode, Refused, refuse

_SHOWN = 10  # ids in a message
_LONGEST = 200  # characters of a name that are looked at
_COMMIT = re.compile(r"[0-9a-f]{8,40}")


class Found(msgspec.Struct, frozen=True):
    """The model of a name, and the profile that the name asks for (None, "" = none).

    `adapters`: those that the name asks for; None = it says nothing of them.
    """

    entry: ModelEntry
    profile: Profile | None = None
    profile_name: str = ""
    adapters: tuple[Shelved, ...] | None = None


FindAdapters = Callable[[ModelEntry, list[str]], tuple[Shelved, ...]]
"""The adapters of these names, for a model. Raises `Refused`."""


def _no_adapters(entry: ModelEntry, names: list[str]) -> tuple[Shelved, ...]:
    raise _refused(f"{entry.id} has no adapter {'+'.join(names)!r}")


def names_of(entry: ModelEntry, options: ModelOptions) -> list[str]:
    """Every name of a model, the id first; no profile in them."""
    return list(dict.fromkeys([entry.id, *options.aliases, *entry.aliases]))


class Names:
    """The names of some models. `said`: what the settings file says, by an id or a name of a card.

    An id wins over an alias of the settings file, that over one of a card; among equals the first entry wins. A
    profile wins over an adapter of its name, which `adapters` finds.
    """

    def __init__(
        self,
        entries: list[ModelEntry],
        said: Mapping[str, ModelOptions],
        adapters: FindAdapters = _no_adapters,
    ) -> None:
        self.entries = entries
        self._adapters = adapters
        self.said = said
        ids = {entry.id for entry in entries}
        self.options_of: dict[str, ModelOptions] = {}
        for entry in entries:
            keys = [
                entry.id,
                *(alias for alias in entry.aliases if alias not in ids),
                *(key for key in _revisions(entry) if key not in ids),
            ]
            self.options_of[entry.id] = next((said[key] for key in keys if key in said), ModelOptions())
        self._exact: dict[str, ModelEntry] = {}
        own = [(entry.id, entry) for entry in entries]
        given = [(alias, entry) for entry in entries for alias in self.options_of[entry.id].aliases]
        carried = [(alias, entry) for entry in entries for alias in entry.aliases]
        for name, entry in (*own, *given, *carried):
            self._exact.setdefault(name, entry)

    def resolve(self, name: str) -> Found:
        """The model and profile of a name; an exact name always wins over a part of another.

        Raises `Refused` (model_not_found, `param` model): empty, unclear (naming the candidates), an unknown
        profile or adapter (naming the model's), or unknown (with near matches); invalid_request for an adapter that
        is not the model's.
        """
        if not name.strip():
            raise _refused("the model's name is empty; `mlxd ls` lists names")
        if entry := self._exact.get(name):
            return Found(entry)
        head, colon, profile = name.rpartition(":")
        if colon and (entry := self._exact.get(head)):
            return self._with_profile(entry, profile)
        if entry := self._by_ending(name) or self._by_revision(name):
            return Found(entry)
        if colon and (entry := self._by_ending(head) or self._by_revision(head)):
            return self._with_profile(entry, profile)
        raise _refused(self._not_found(name))

    def _with_profile(self, entry: ModelEntry, name: str) -> Found:
        profiles = self.options_of[entry.id].profiles
        if name in profiles:
            return Found(entry, profiles[name], name)
        there = f"it has {', '.join(profiles)}" if profiles else "it has none"
        said = f"{entry.id} has no profile {name!r}; {there}"
        if not name.strip():
            raise _refused(said)
        try:
            return Found(entry, adapters=self._adapters(entry, parsed(name)))
        except Refused as refused:
            if refused.failure.code is not ErrorCode.MODEL_NOT_FOUND:
                raise
            nor = refused.failure.message.removeprefix(f"{entry.id} has ")
            raise _refused(f"{said}, and {nor}") from None

    def model_of(self, name: str) -> ModelEntry | None:
        """The model of an exact name or the end of one, without profile and adapter; None where none is meant."""
        try:
            return self._exact.get(name) or self._by_ending(name)
        except Refused:  # unclear
            return None

    def _by_ending(self, name: str) -> ModelEntry | None:
        wanted = name.casefold()
        matches = [
            entry
            for entry in self.entries
            if any(wanted in _endings(known) for known in names_of(entry, self.options_of[entry.id]))
        ]
        if len(matches) > 1:  # who writes a whole id in other letters means that one
            matches = [entry for entry in matches if entry.id.casefold() == wanted] or matches
        return _only(matches, name)

    def _by_revision(self, name: str) -> ModelEntry | None:
        """`NAME@REF` and `NAME@COMMIT` (8 digits or more) of a model in the Hugging Face cache, whatever it is listed
        as; NAME alone where none is listed so, and there is only one revision of it.
        """
        wanted, at, revision = name.partition("@")
        of_name = [entry for entry in self.entries if entry.revision and wanted.casefold() in _bare(entry)]
        if not at:
            return _only(of_name, name)
        for matches in (
            [entry for entry in of_name if revision in entry.refs],
            [entry for entry in of_name if revision.casefold() in map(str.casefold, entry.refs)],
            [
                entry
                for entry in of_name
                if _COMMIT.fullmatch(revision.lower()) and entry.revision.startswith(revision.lower())
            ],
        ):
            if matches:
                return _only(matches, name)
        return None

    def _not_found(self, name: str) -> str:
        """A name may be megabytes, and looking for what is near it takes as long as it is."""
        name = name[:_LONGEST]
        if not self.entries:
            return f"there is no model {name!r}, and none at all yet; `mlxd pull starter` fetches one"
        known = {each.casefold(): each for each in self._exact}
        near = difflib.get_close_matches(name.casefold(), known, n=3, cutoff=0.5)
        if near:
            return f"there is no model {name!r}; did you mean {' or '.join(known[each] for each in near)}?"
        ids = [entry.id for entry in self.entries]
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        return f"there is no model {name!r}; there is {', '.join(ids[:_SHOWN])}{more}"


def _only(matches: list[ModelEntry], name: str) -> ModelEntry | None:
    """The one that there is; None without any. Raises `Refused` with the candidates."""
    if len(matches) > 1:
        meant = ", ".join(entry.id for entry in matches[:_SHOWN])
        raise _refused(f"{name!r} may mean {meant}; write the whole name")
    return matches[0] if matches else None


def _revisions(entry: ModelEntry) -> list[str]:
    """Ids under which a revision is listed at other times, as refs come and go."""
    if not entry.revision:
        return []
    bare = entry.id.partition("@")[0]
    return [f"{bare}@{name}" for name in (*entry.refs, entry.revision[:8], entry.revision)]


def _bare(entry: ModelEntry) -> set[str]:
    """What may stand before the `@`; here a renamed copy (`hf:org/name`) may go by its own name."""
    bare = entry.id.partition("@")[0]
    return _endings(bare) | _endings(bare.rpartition(":")[2])


def _endings(name: str) -> set[str]:
    """`c`, `b/c` and `a/b/c` of `a/b/c`. A renamed copy (`hf:org/name`) has to be named whole."""
    parts = name.casefold().split("/")
    starts = [0] if ":" in name else range(len(parts))
    return {"/".join(parts[at:]) for at in starts} - {""}


def _refused(message: str) -> Refused:
    return refuse(ErrorCode.MODEL_NOT_FOUND, message, param="model")
