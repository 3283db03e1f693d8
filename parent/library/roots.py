"""Where models lie: the own folder, further folders, and the Hugging Face cache; one place for each model.

In the own and the further folders a model is a folder `NAME` or `ORG/NAME`; folders with a leading dot are
unfinished work and never seen.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from parent.config import Settings
from parent.library import hf_cache
from parent.library.signature import same_content

Root = Literal["own", "extra", "hf", "path"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder and the id it would have. `label`: what goes before the id where another has it already."""

    id: str
    path: Path
    root: Root
    label: str
    revision: str = ""  # the commit, in the Hugging Face cache
    refs: list[str] = []  # the names of the refs that point to it there


def models_dir(data_dir: Path) -> Path:
    """Where finished models of our own lie."""
    return data_dir / "models"


def places(settings: Settings, environ: Mapping[str, str], home: Path) -> Iterator[Place]:
    """Every model folder of every root, the own ones first."""
    yield from _below(models_dir(settings.data_dir), "own", "own")
    for number, folder in enumerate(settings.model_dirs):
        label = f"extra{number + 1}" if number else "extra"
        yield from _below(Path(folder).expanduser().absolute(), "extra", label)
    cache = hf_cache.cache_dir(settings.hf_cache, environ, home)
    for found in hf_cache.snapshots(cache) if cache else ():
        yield Place(
            id=found.name, path=found.path, root="hf", label="hf", revision=found.commit, refs=found.refs
        )


def unique(found: Iterable[Place]) -> list[Place]:
    """Each folder once and each id once: the first has the id, a later one is renamed, or left out as a copy."""
    kept: dict[str, Place] = {}
    folders: set[str] = set()
    for place in found:
        real = os.path.realpath(place.path)
        if real in folders:
            continue
        folders.add(real)
        first = kept.get(place.id)
        if first is None:
            kept[place.id] = place
        elif not same_content(first.path, place.path):
            renamed = f"{place.label}:{place.id}"
            kept.setdefault(renamed, msgspec.structs.replace(place, id=renamed))
        elif place.revision and not first.revision:  # the names of the copy that is left out lead to this one
            kept[place.id] = msgspec.structs.replace(first, revision=place.revision, refs=place.refs)
    return list(kept.values())


def _below(root: Path, kind: Root, label: str) -> Iterator[Place]:
    for folder in _model_folders(root):
        yield Place(id=folder.relative_to(root).as_posix(), path=folder, root=kind, label=label)


def _model_folders(root: Path) -> Iterator[Path]:
    for folder in _visible_folders(root):
        if _looks_like_a_model(folder):
            yield folder
        else:  # an organisation
            yield from (inner for inner in _visible_folders(folder) if _looks_like_a_model(inner))


def _visible_folders(root: Path) -> list[Path]:
    """By name, links last: of a folder and a link to it, the folder is the model."""
    try:
        names = os.listdir(root)
    except OSError:  # absent, removed meanwhile, or not ours to read: nothing to list
        return []
    folders = [root / name for name in names if _may_be_a_name(name) and os.path.isdir(root / name)]
    return sorted(folders, key=lambda folder: (folder.is_symlink(), folder.name))


def _may_be_a_name(name: str) -> bool:
    """Not hidden, and fit for JSON and a terminal: what is not UTF-8 or holds control characters is neither."""
    return not name.startswith(".") and name != "lost+found" and name.isprintable()


def _looks_like_a_model(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except PermissionError:  # listed, so that its reader is told why it cannot be served
        return True
    except OSError:
        return False
    return any(name in ("config.json", "mlxd.json") or name.endswith(".safetensors") for name in names)
