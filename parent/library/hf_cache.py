"""The Hugging Face hub cache, read in place: which models and revisions in it are complete.

Its layout: `models--ORG--NAME/{blobs,refs,snapshots/COMMIT}`. A snapshot is a folder of links into `blobs`; a file
gets its link once it is downloaded whole. `refs/main` holds the commit of the default branch. While a pull of ours
runs, `.mlxd-pulling` beside them holds the commit that is not to be seen yet.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from shared.checkpoint import INDEX, SINGLE
from shared.files import decode_json, read_regular

PULLING = ".mlxd-pulling"
PARTS = ".mlxd-parts"
_ETAG = re.compile(r"[0-9a-f]{40,64}")
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_READ = (".json", ".safetensors", ".jinja", ".model")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


class Snapshot(msgspec.Struct, frozen=True):
    """A complete revision. `name`: of the model, with `@REF` or `@COMMIT` unless it is what `main` points to.

    `refs`: the names of all refs that point to it.
    """

    name: str
    commit: str
    path: Path
    refs: list[str]


def cache_dir(setting: str, environ: Mapping[str, str], home: Path) -> Path | None:
    """The cache folder that `hf_cache` means, whether it exists or not; None for `none`.

    `auto` follows `huggingface_hub`: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub.
    """
    if setting == "none":
        return None
    if setting != "auto":
        return _expanded(setting, home)
    if chosen := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(chosen, home)
    if chosen := environ.get("HF_HOME"):
        return _expanded(chosen, home) / "hub"
    caches = environ.get("XDG_CACHE_HOME")
    return (_expanded(caches, home) if caches else home / ".cache") / "huggingface" / "hub"


def _expanded(path: str, home: Path) -> Path:
    if path == "~" or path.startswith("~/"):
        return home / path[2:]
    return Path(path).absolute()


def forget_parts(cache: Path, repo: str) -> None:
    """Remove what pulls of ours have begun of a repository and not ended; nothing while one is at it."""
    folder = cache / "--".join(["models", *repo.split("/")])
    parts = folder / PARTS
    with contextlib.suppress(OSError), (folder / PULLING).open("ab") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / PULLING).unlink(missing_ok=True)
        for etag in parts.read_text(encoding="utf-8").split():
            if _ETAG.fullmatch(etag):
                (folder / "blobs" / f"{etag}.incomplete").unlink(missing_ok=True)
        parts.unlink()


def snapshots(cache: Path) -> Iterator[Snapshot]:
    """Every complete revision of every model, by name; nothing where there is no such folder."""
    for folder in _folders(cache):
        parts = folder.name.split("--")
        if parts[0] == "models" and len(parts) > 1 and all(parts):
            yield from _revisions(folder, "/".join(parts[1:]))


def _revisions(folder: Path, model: str) -> Iterator[Snapshot]:
    refs = refs_of(folder)
    complete = complete_in(folder)
    if not complete:
        return
    names = {commit: [name for name, target in refs.items() if target == commit] for commit in complete}
    default = refs.get("main", "")
    if default and default not in complete:  # a newer one is on its way: what main pointed to has no ref now
        before = [commit for commit in complete if not names[commit]]
        default = max(before, key=lambda commit: (_changed_ns(complete[commit]), commit), default="")
    if default:
        yield Snapshot(model, default, complete[default], names[default])
    taken: set[str] = set()
    for commit in sorted(complete.keys() - {default}):
        label = names[commit][0] if names[commit] else commit[:8]
        label = commit if label in taken else label
        taken.add(label)
        yield Snapshot(f"{model}@{label}", commit, complete[commit], names[commit])


def complete_in(folder: Path, *, is_held: bool = False) -> dict[str, Path]:
    """The complete revisions in a repository's folder, by commit. `is_held`: the marker of a pull there is our own."""
    hidden = None if is_held else _read(folder / PULLING)
    pending = hidden is not None or is_pending(folder)
    return {
        each.name: each
        for each in _folders(folder / "snapshots")
        if each.name != hidden and _is_complete(each, pending)
    }


def refs_of(repository: Path) -> dict[str, str]:
    """Name of each ref (`main`, `v1`, `refs/pr/3`) to its commit, the oldest first: a later one of the same commit
    must not rename the model.
    """
    folder = repository / "refs"
    found = {}
    for place, _, files in os.walk(folder):
        for file in files:
            path = Path(place) / file
            name = path.relative_to(folder).as_posix()
            if name.isprintable() and (commit := _read(path)):
                found[_changed_ns(path), name] = commit
    return {name: found[at, name] for at, name in sorted(found)}


def _read(file: Path) -> str | None:
    """The word in a small file; None without one."""
    try:
        return read_regular(file).decode().strip()
    except (OSError, ValueError):
        return None


def is_pending(folder: Path) -> bool:
    """Whether a file of a repository is being downloaded, or was when the download stopped."""
    try:
        return any(name.endswith(".incomplete") for name in os.listdir(folder / "blobs"))
    except OSError:
        return False


def _is_complete(snapshot: Path, pending: bool) -> bool:
    """Config, tokenizer and every weight file are there; no link leads nowhere."""
    try:
        with os.scandir(snapshot) as items:
            there = {item.name: os.path.exists(item.path) and not item.is_dir() for item in items}
    except OSError:
        return False
    if any(
        name.endswith(_READ) and not is_file and not _is_folder(snapshot / name)
        for name, is_file in there.items()
    ):
        return False
    if not there.get("config.json") or not any(there.get(name) for name in _TOKENIZERS):
        return False
    return _has_weights(snapshot, {name for name, is_file in there.items() if is_file}, pending)


def _has_weights(snapshot: Path, files: set[str], pending: bool) -> bool:
    if SINGLE in files:
        return True
    if INDEX in files:
        named = _named_by_index(snapshot / INDEX)
        return named <= files  # an index that says nothing is a broken model, and listed as one
    shards = {name: int(found[1]) for name in files if (found := _SHARD.fullmatch(name))}
    if shards:
        return len(shards) == max(shards.values())
    others = [
        name
        for name in files
        if name.startswith(("model", "pytorch_model")) and name.endswith((".safetensors", ".bin"))
    ]
    return bool(others) and not pending  # without an index or numbers nobody knows how many there should be


def _named_by_index(index: Path) -> set[str]:
    try:
        weight_map = decode_json(read_regular(index))["weight_map"]
        return {str(name) for name in weight_map.values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _folders(root: Path) -> list[Path]:
    """The folders in `root` by name; those that cannot be looked at are left out."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [
        root / name
        for name in names
        if not name.startswith(".") and name.isprintable() and _is_folder(root / name)
    ]


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
