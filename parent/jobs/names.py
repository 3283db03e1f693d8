"""What people call models, adapters and data sets, and where those lie. A path from outside leads to the disk only
where it is a folder that we know by name too.
"""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from parent.config import Settings
from parent.library.adapters import adapters_dir
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.library.roots import models_dir
from shared.errors import ErrorCode, Refused, refuse

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(_PART)
_MODEL = re.compile(rf"{_PART}(/{_PART})?")
_SHOWN = 10
TRAIN = "train.jsonl"


class Names:
    """Of one moment: `library` was scanned, `settings` are those in force. `promised`: paths of what jobs are making.
    `trusts_paths`: they come from the user of this machine himself, on a command line, so that any folder will do for
    data.
    """

    def __init__(
        self,
        library: Library,
        settings: Settings,
        *,
        promised: Collection[str] = (),
        trusts_paths: bool = False,
    ) -> None:
        self.library = library
        self.settings = settings
        self._promised = frozenset(path.casefold() for path in promised)
        self._trusts_paths = trusts_paths

    # ------------------------------------------------------------ what goes in

    def model(self, text: str) -> ModelEntry:
        """By a name, or the path of a folder that is listed. Raises `Refused` (model_not_found, bad_checkpoint)."""
        entry = self.library.model_of(text) if _is_path(text) else None
        if entry is None:
            found = self.library.resolve(text)
            if found.adapters:
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"{text[:80]!r} is a model with adapters; name the model alone, or fuse them first",
                )
            entry = found.entry
        if entry.error:
            code = ErrorCode.UNSUPPORTED if entry.unsupported else ErrorCode.BAD_CHECKPOINT
            raise refuse(code, f"{entry.id}: {entry.error}")
        return entry

    def adapter(self, text: str) -> Path:
        """By a name, or the path of a folder below the folders of adapters. Raises `Refused`."""
        shelf = self.library.shelf
        if _is_path(text):
            one = shelf.at(text)
        else:
            found = [each for each in shelf.entries if each.id == text]
            if not found:
                there = _listed(each.id for each in shelf.entries)
                raise refuse(
                    ErrorCode.MODEL_NOT_FOUND, f"there is no adapter {text[:80]!r}; there is {there}"
                )
            one = found[0]
        if one.error:
            raise refuse(ErrorCode.BAD_CHECKPOINT, f"adapter {one.id}: {one.error}")
        return one.path

    def adapters(self, model: ModelEntry, texts: list[str]) -> list[Path]:
        """Several, which the model can take. Raises `Refused`."""
        if any(map(_is_path, texts)):
            return [self.adapter(text) for text in texts]
        return [one.path for one in self.library.adapters(model, texts)]

    def dataset(self, text: str) -> Path:
        """A folder with `train.jsonl`, by its name or path below the folders of data sets. Raises `Refused`."""
        roots = self.dataset_roots()
        if _is_path(text):
            found = Path(os.path.realpath(os.path.expanduser(text)))
            inside = self._trusts_paths or any(found.is_relative_to(os.path.realpath(root)) for root in roots)
            if not inside:
                raise refuse(
                    ErrorCode.FORBIDDEN,
                    f"{text[:200]} is not below a folder of data sets; move it to {roots[0]}, or add its folder to "
                    "the setting dataset_dirs",
                )
        else:
            _check(_MODEL, text, "a data set")
            found = next((root / text for root in roots if (root / text).is_dir()), roots[0] / text)
        if not (found / TRAIN).is_file():
            there = _listed(self.datasets())
            raise refuse(
                ErrorCode.NOT_FOUND, f"there is no data set {text[:80]!r} with a {TRAIN}; there is {there}"
            )
        return found

    def text(self, text: str) -> Path:
        """What is read as plain text: the `train.jsonl` of a data set."""
        return self.dataset(text) / TRAIN

    # ------------------------------------------------------------ what comes out

    def free_model(self, name: str) -> Path:
        """Where a new model of this name will lie. Raises `Refused` (invalid_request, conflict)."""
        _check(_MODEL, name, "a model")
        return _free(models_dir(self.settings.data_dir) / name)

    def free_adapter(self, name: str) -> Path:
        _check(_NAME, name, "an adapter")
        return _free(adapters_dir(self.settings.data_dir) / name)

    def free_dataset(self, name: str) -> Path:
        _check(_NAME, name, "a data set")
        return _free(self.dataset_roots()[0] / name)

    def free_count(self, name: str) -> Path:
        """Of the job that checks the machinery."""
        _check(_NAME, name, "a count")
        return _free(self.settings.data_dir / "counts" / name)

    def numbered(self, stem: str, place: Path) -> str:
        """The first of `stem`, `stem-2`, `stem-3`, … that is free there."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:80] or "job"
        number, name = 1, stem
        while os.path.lexists(place / name) or str(place / name).casefold() in self._promised:
            number += 1
            name = f"{stem}-{number}"
        return name

    # ------------------------------------------------------------ data sets

    def dataset_roots(self) -> list[Path]:
        """Ours first."""
        more = [Path(folder).expanduser().absolute() for folder in self.settings.dataset_dirs]
        return [datasets_dir(self.settings.data_dir), *more]

    def datasets(self) -> list[str]:
        """The names of those that are there."""
        return sorted(
            {
                file.parent.name
                for root in self.dataset_roots()
                for file in root.glob(f"*/{TRAIN}")
                if not file.parent.name.startswith(".")
            }
        )


def datasets_dir(data_dir: Path) -> Path:
    """Where data sets of our own lie."""
    return data_dir / "datasets"


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~"))


def _check(pattern: re.Pattern[str], name: str, what: str) -> None:
    if not pattern.fullmatch(name):
        more = " and at most one '/'" if pattern is _MODEL else ""
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"{name[:80]!r} cannot be the name of {what}; use letters, digits, '.', '-', '_'{more}",
        )


def _free(path: Path) -> Path:
    if os.path.lexists(path):
        raise taken(path)
    return path


def taken(path: Path) -> Refused:
    """The refusal of an output that exists."""
    return refuse(ErrorCode.CONFLICT, f"{path} exists; choose another name, or remove it")


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more if found else "none"
