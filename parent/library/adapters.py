"""The adapters on disk: every root scanned, names resolved, and which model each was made for.

An adapter is a folder below `<data folder>/adapters` or a folder of `adapter_roots`; its name is the path from there.
Scans read headers, of those that have changed.
"""

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from parent.config import Settings
from parent.library.catalog import ModelEntry
from shared.adapter import BEST, Adapter, canonical, files_of, inspect_adapter, misfit
from shared.checkpoint import inspect, tensors_of
from shared.errors import ErrorCode, Refused, refuse

DEPTH = 3  # folders below a root; checkpoints of a run lie in `NAME/checkpoints/step-…`
MOST = 8  # adapters in one stack
NONE = "none"
_SHOWN = 10
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

FindModel = Callable[[str], ModelEntry | None]
"""The model that is called so, if one is here."""


class Shelved(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter folder. With `error` it cannot be mounted. `signature`: another one once its files are."""

    id: str
    path: Path
    signature: str
    adapter: Adapter | None = None
    error: str = ""

    @property
    def key(self) -> str:
        """What a worker knows it by."""
        return f"{self.id}@{self.signature}"

    def bytes_in(self, dtype: str) -> int:
        """In the memory of a worker that runs in this type, or a little more."""
        if self.adapter is None:
            return 0
        numbers = sum(one.rank * sum(one.shape) + 2 * one.shape[0] for one in self.adapter.modules.values())
        return numbers * _DTYPE_BYTES.get(dtype, 4)


def adapters_dir(data_dir: Path) -> Path:
    """Where adapters of our own lie."""
    return data_dir / "adapters"


def parsed(text: str) -> list[str]:
    """`a+b` or `a,b` -> the names; `none` and nothing -> none of them. Raises `Refused`."""
    names = [name.strip() for name in text.replace(",", "+").split("+")]
    if names in ([""], [NONE]):
        return []
    if "" in names or NONE in names:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"adapter: {text[:80]!r} is no list of adapters; write NAME or NAME+NAME, or none",
            param="adapter",
        )
    return names


class Shelf:
    """The adapters of all roots. `settings` is asked each time."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._shapes: dict[str, dict[str, tuple[int, int]]] = {}  # by the signature of a model
        self.entries: list[Shelved] = []

    def roots(self, settings: Settings | None = None) -> list[Path]:
        """Where adapters may lie."""
        settings = settings or self._settings()
        more = [Path(folder).expanduser().absolute() for folder in settings.adapter_roots]
        return [adapters_dir(settings.data_dir), *more]

    def scan(self, settings: Settings) -> None:
        """Look at every root of these settings."""
        known = {each.path: each for each in self.entries}
        found: dict[str, Shelved] = {}
        for root in self.roots(settings):
            for folder in _below(root, DEPTH):
                name = folder.relative_to(root).as_posix()
                if name not in found and _is_name(name):
                    found[name] = _read(folder, name, known.get(folder))
        self.entries = [found[name] for name in sorted(found)]

    def learn(self, entries: Sequence[ModelEntry]) -> None:
        """Read the shapes by which adapters are matched: in a scan, so that no request waits for the disk."""
        if any(one.adapter for one in self.entries):
            for entry in entries:
                if entry.kind == "chat":
                    self._entry_shapes(entry)

    # ------------------------------------------------------------ names

    def find(self, entry: ModelEntry, names: Sequence[str], model_of: FindModel) -> tuple[Shelved, ...]:
        """The adapters of these names as they are now, for a model.

        Raises `Refused`: model_not_found with near matches, invalid_request with what does not match.
        """
        if len(names) > MOST:
            raise _bad(f"at most {MOST} adapters can be added up, not {len(names)}")
        found = tuple(self._one(entry, name, model_of) for name in names)
        if twice := next((one.id for n, one in enumerate(found) if one in found[:n]), ""):
            raise _bad(f"adapter {twice} is named twice")
        for one in found:
            if len(found) > 1 and one.adapter is not None and one.adapter.kind == "dora":
                raise _bad(
                    f"adapter {one.id} is a DoRA, which cannot be added to others; use it alone, or fuse it"
                )
        return found

    def at(self, path: str) -> Shelved:
        """The adapter of a folder. Raises `Refused` (forbidden, model_not_found) for one that is not below a root."""
        real = os.path.realpath(os.path.expanduser(path))
        inside = any(
            os.path.commonpath([real, os.path.realpath(root)]) == os.path.realpath(root)
            for root in self.roots()
        )
        if not inside:
            raise refuse(
                ErrorCode.FORBIDDEN,
                f"{path[:200]} is not below a folder of adapters; move it to {self.roots()[0]}, or add its folder to "
                "adapter_roots",
                param="path",
            )
        for each in self.entries:
            if os.path.realpath(each.path) == real:
                return _read(each.path, each.id, each)
        raise refuse(ErrorCode.MODEL_NOT_FOUND, f"there is no adapter in {path[:200]}", param="path")

    def _one(self, entry: ModelEntry, name: str, model_of: FindModel) -> Shelved:
        wanted = name.casefold()
        matches = [one for one in self.entries if one.id == name] or [
            one
            for one in self.entries
            if one.id.casefold() == wanted or one.id.casefold().endswith(f"/{wanted}")
        ]
        if len(matches) > 1:
            raise _bad(f"adapter {name!r} may mean {', '.join(one.id for one in matches[:_SHOWN])}")
        if not matches:
            raise refuse(ErrorCode.MODEL_NOT_FOUND, self._unknown(entry, name, model_of), param="adapter")
        one = _read(matches[0].path, matches[0].id, matches[0])
        if one.error:
            raise _bad(f"adapter {one.id} cannot be used: {one.error}")
        if problem := self.misfit(one, entry, model_of):
            raise _bad(f"adapter {one.id} is not one of {entry.id}: {problem}")
        return one

    def _unknown(self, entry: ModelEntry, name: str, model_of: FindModel) -> str:
        ids = [one.id for one in self.of(entry, model_of)]
        said = f"{entry.id} has no adapter {name[:80]!r}"
        if near := difflib.get_close_matches(name, ids, n=3, cutoff=0.5):
            return f"{said}; did you mean {' or '.join(near)}?"
        return f"{said}; it has {', '.join(ids[:_SHOWN])}" if ids else f"{said}; it has none"

    # ------------------------------------------------------------ whose they are

    def of(self, entry: ModelEntry, model_of: FindModel) -> list[Shelved]:
        """Those that can be mounted into a model."""
        return [one for one in self.entries if not one.error and not self.misfit(one, entry, model_of)]

    def misfit(self, one: Shelved, entry: ModelEntry, model_of: FindModel) -> str:
        """Why an adapter is not one of this model; "" = it is.

        By the name of its base where that is a model here; else by the shapes of what it changes.
        """
        if one.adapter is None:
            return one.error
        others = []
        for name in one.adapter.base_models:
            other = model_of(name)
            if other is not None and other.id == entry.id:
                return ""
            if other is not None:
                others.append(other.id)
        if others:
            return f"it was made for {others[0]}"
        if not self._entry_shapes(entry):
            return "the shapes of that model are not known"
        return misfit(one.adapter, self._entry_shapes(entry))

    def _entry_shapes(self, entry: ModelEntry) -> dict[str, tuple[int, int]]:
        if entry.signature not in self._shapes:
            self._shapes[entry.signature] = {} if entry.error else _shapes(entry.path)
        return self._shapes[entry.signature]


# ---------------------------------------------------------------- disk


def _below(root: Path, depth: int) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(root))
    except OSError:  # absent, or not ours to read
        return
    for name in names:
        folder = root / name
        if name.startswith(".") or not name.isprintable() or not folder.is_dir():
            continue
        is_one = files_of(folder) is not None
        if is_one:
            yield folder
        if depth > 1:
            yield from (
                inner for inner in _below(folder, depth - 1) if not (is_one and inner == folder / BEST)
            )


def _is_name(name: str) -> bool:
    """Fit to be written in `model:a+b`."""
    return not any(mark in name for mark in "+,:@") and name != NONE


def _read(folder: Path, name: str, known: Shelved | None) -> Shelved:
    """The adapter as it is now; what was known of it where its files have not changed."""
    signature = _signature(folder)
    if known is not None and known.signature == signature:
        return known
    try:
        return Shelved(id=name, path=folder, signature=signature, adapter=inspect_adapter(folder))
    except Refused as refused:
        return Shelved(id=name, path=folder, signature=signature, error=str(refused))
    except Exception as error:  # files of strangers
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return Shelved(id=name, path=folder, signature=signature, error=f"not understood ({problem})")


def _signature(folder: Path) -> str:
    digest = hashlib.blake2b(str(folder).encode(errors="surrogateescape"), digest_size=6)
    for file in files_of(folder) or ():
        try:
            found = os.stat(file)
        except OSError:
            continue
        digest.update(f"{file.name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n".encode())
    return digest.hexdigest()


def _shapes(model: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of every matrix of a model, multiplied out, by canonical name; {} where it cannot be read."""
    try:
        checkpoint = inspect(model)
        tensors = tensors_of(checkpoint)
    except (Refused, OSError):
        return {}
    scheme = checkpoint.config.get("quantization") or {}
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(tensor.shape) != 2:
            continue
        out, wide = tensor.shape
        if f"{module}.scales" in tensors:
            override = scheme.get(module)
            bits = (override if isinstance(override, dict) else scheme).get("bits", scheme.get("bits", 4))
            wide = wide * 32 // bits
        found[canonical(module)] = (out, wide)
    return found


def _bad(message: str) -> Refused:
    return refuse(ErrorCode.INVALID_REQUEST, message, param="adapter")
