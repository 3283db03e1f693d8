"""All models that there are: every root scanned, names resolved, and what the settings say of each.

`entries` is what the last scan found and never waits for the disk; `scan` looks again, in the caller's thread,
`refresh` beside the event loop.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parent.config import Settings
from parent.library.adapters import Shelf, Shelved
from parent.library.catalog import ModelEntry, by_another_python, default_entry, folder_of, read_entry
from parent.library.index import Index
from parent.library.names import Found, Names, names_of
from parent.library.roots import Place, places, unique
from parent.library.signature import signature_of
from parent.model_options import ModelOptions
from shared.errors import Refused

if TYPE_CHECKING:
    import asyncio


class Added(msgspec.Struct, frozen=True):
    """A model folder that was named by its path, and what was said of it when it had that signature."""

    place: Place
    entry: ModelEntry
    signature: str


class Library:
    """The models of all roots. `settings_source` and `options` are asked each time: both may change meanwhile."""

    def __init__(
        self,
        settings_source: Callable[[], Settings],
        options: Callable[[], dict[str, ModelOptions]],
        *,
        environ: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> None:
        self._settings = settings_source
        self._options = options
        self._environ = os.environ if environ is None else environ
        self._home = home or Path.home()
        self._added: dict[str, Added] = {}
        self._scanning = threading.Lock()
        self._known: Names | None = None
        self._refreshing: asyncio.Task[bool] | None = None
        self.entries: list[ModelEntry] = []
        self.shelf = Shelf(settings_source)

    # ------------------------------------------------------------ what there is

    def scan(self) -> bool:
        """Look at every root; True when something is new, gone or changed. Reads the headers of changed models."""
        with self._scanning:
            settings = self._settings()
            index = Index(settings.data_dir)
            try:
                added = dict(self._added)
                # Those first: somebody holds their ids, which must not come to mean another model.
                listed = [
                    *(each.place for each in added.values()),
                    *places(settings, self._environ, self._home),
                ]
                entries = [
                    entry
                    for place in unique(listed)
                    if (entry := _entry_of(place, index, added.get(place.id)))
                ]
                index.forget_absent()
            finally:
                index.close()
            said = Names(entries, self._options()).options_of
            entries = [by_another_python(entry, said[entry.id].python) for entry in entries]
            entries.sort(key=lambda entry: entry.id)
            self.shelf.scan(settings)
            self.shelf.learn(entries)
            changed = entries != self.entries
            self.entries = entries
            return changed

    async def refresh(self) -> bool:
        """`scan` in a thread. Callers that come while one runs share it."""
        import asyncio  # here, because it costs every command that only looks 30 ms

        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(asyncio.to_thread(self.scan))
        return await asyncio.shield(self._refreshing)

    def add(self, entry: ModelEntry) -> ModelEntry:
        """Take in a model folder from anywhere, which later scans look at too. The entry as it is listed.

        A folder that is listed already stays as it is; where its id is taken it becomes `path:ID`. What the entry
        says counts until the folder changes.
        """
        real = os.path.realpath(entry.path)
        for known in self.entries:
            if os.path.realpath(known.path) == real:
                return known
        taken = {known.id for known in self.entries}
        model_id = f"path:{entry.id}" if entry.id in taken else entry.id
        added = msgspec.structs.replace(entry, id=model_id, root="path")
        place = Place(id=model_id, path=entry.path, root="path", label="path")
        self._added[model_id] = Added(place, added, signature_of(entry.path).model)
        self.entries = sorted([*self.entries, added], key=lambda each: each.id)
        return added

    # ------------------------------------------------------------ names

    def options(self, model_id: str) -> ModelOptions:
        """What the settings file says of a model, by its id or a name of its card; defaults without a word."""
        names = self._names()
        return names.options_of.get(model_id) or self._options().get(model_id) or ModelOptions()

    def names(self, entry: ModelEntry) -> list[str]:
        """The id and every alias, of the settings file and of the card."""
        return names_of(entry, self.options(entry.id))

    def resolve(self, name: str) -> Found:
        """The model and profile of a name, broken ones too. Raises `Refused` (model_not_found)."""
        return self._names().resolve(name)

    def adapters(self, entry: ModelEntry, names: list[str]) -> tuple[Shelved, ...]:
        """The adapters of these names, for a model. Raises `Refused` (model_not_found, invalid_request)."""
        return self.shelf.find(entry, names, self.model_of)

    def adapters_of(self, entry: ModelEntry) -> list[Shelved]:
        """All that can be mounted into a model."""
        return self.shelf.of(entry, self.model_of)

    def model_of(self, name: str) -> ModelEntry | None:
        """The model that an adapter calls its base: by a name, or the path of its folder; None = it is not here."""
        if name.startswith(("/", "~", ".")) or (os.sep in name and os.path.isdir(name)):
            real = os.path.realpath(os.path.expanduser(name))
            return next((each for each in self.entries if os.path.realpath(each.path) == real), None)
        return self._names().model_of(name)

    def default(self) -> ModelEntry:
        """The model of a request that names none: the setting `model`, the starter, the first that can be served.

        The setting may be the path of a folder that is listed. Raises `Refused` (model_not_found).
        """
        wanted = self._settings().model
        if not wanted:
            return default_entry(self.entries)
        try:
            return self.resolve(wanted).entry
        except Refused:
            folder = folder_of(wanted)
            for entry in self.entries if folder else ():
                if os.path.realpath(entry.path) == os.path.realpath(str(folder)):
                    return entry
            raise

    def _names(self) -> Names:
        """Made anew only where the models or the settings file are others: it is asked at every request."""
        entries, said, known = self.entries, self._options(), self._known
        if known is None or known.entries is not entries or known.said != said:
            known = self._known = Names(entries, said, self.adapters)
        return known


def _entry_of(place: Place, index: Index, added: Added | None) -> ModelEntry | None:
    """The entry of a place, from the index where the folder is what it was; None when the folder has gone."""
    signature = signature_of(place.path)
    if added and added.signature == signature.model and not added.entry.error and os.path.isdir(place.path):
        return added.entry
    known = index.find(place.path, signature)
    if known is None:
        known = read_entry(place.path, place.id, root=place.root, revision=place.revision)
        if known.error and not os.path.isdir(place.path):
            return None
        # What is broken is read anew each time: rights, for one, change without a trace in the signature.
        if (not known.error or known.unsupported) and known.signature == signature.model:
            index.keep(place.path, signature, known)
    return msgspec.structs.replace(
        known, id=place.id, root=place.root, revision=place.revision, refs=place.refs
    )
