"""The library of a command, and the model that a person means by a name or the path of a folder."""

from collections.abc import Mapping

from parent.config import Settings
from parent.library.catalog import ModelEntry, folder_of, read_entry
from parent.library.library import Library
from parent.model_options import ModelOptions
from shared.errors import ErrorCode, Refused, refuse


def library_of(settings: Settings, models: Mapping[str, ModelOptions] | None = None) -> Library:
    """The library as it is now. `models`: what the settings file says of single models."""
    said = dict(models or {})
    library = Library(lambda: settings, lambda: said)
    library.scan()
    return library


def named(library: Library, name: str) -> ModelEntry:
    """The model of a name, else of the folder that the name is the path of. Raises `Refused` (model_not_found)."""
    try:
        return library.resolve(name).entry
    except Refused:
        if folder := folder_of(name):
            return library.add(read_entry(folder, folder.name))
        if "/" in name and name.startswith((".", "/", "~")):
            raise refuse(
                ErrorCode.MODEL_NOT_FOUND, f"there is no model folder {name}", param="model"
            ) from None
        raise
