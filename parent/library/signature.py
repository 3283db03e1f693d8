"""Whether a model folder is what it was: names, sizes and times of the files that make the model.

Nothing is read for a signature. Two folders are compared (`same_content`) by small pieces of their weights.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.files import open_regular

CARD = "mlxd.json"
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".txt")
_PIECES, _PIECE = 16, 4096


class Signature(msgspec.Struct, frozen=True):
    """`model` changes when the model is replaced on disk; `card` when its names do."""

    model: str
    card: str


def signature_of(folder: Path) -> Signature:
    """The signature of a model folder as it is now. Links are followed; what cannot be looked at counts as absent."""
    model, card = hashlib.sha256(), ""
    for name, path in _files(folder):
        try:
            found = os.stat(path)
        except OSError:
            continue
        line = f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n"
        if name == CARD:
            card = hashlib.sha256(line.encode(errors="surrogateescape")).hexdigest()[:16]
        else:
            model.update(line.encode(errors="surrogateescape"))
    return Signature(model.hexdigest()[:16], card)


def same_content(one: Path, other: Path) -> bool:
    """Whether two folders hold the same model: config and tokenizer equal, weights equal in size and in samples."""
    ours, theirs = dict(_files(one)), dict(_files(other))
    for ignored in (CARD, "README.json"):
        ours.pop(ignored, None)
        theirs.pop(ignored, None)
    weights = [name for name in ours if name.endswith(".safetensors")]
    if weights != [name for name in theirs if name.endswith(".safetensors")]:
        return False
    names = [
        *weights,
        *(name for name in ("config.json", "tokenizer.json") if name in ours or name in theirs),
    ]
    try:
        return all(name in ours and name in theirs and _same_file(ours[name], theirs[name]) for name in names)
    except OSError:  # not to be compared, so not known to be the same
        return False


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, path) of the files that matter, by name."""
    try:
        with os.scandir(folder) as items:
            found = sorted((item.name, item.path) for item in items if item.name.endswith(_SUFFIXES))
    except OSError:
        return
    yield from found


def _same_file(one: str, other: str) -> bool:
    if os.path.samefile(one, other):
        return True
    size = os.stat(one).st_size
    if size != os.stat(other).st_size:
        return False
    with open_regular(one) as ours, open_regular(other) as theirs:
        for number in range(_PIECES):
            at = max(0, size - _PIECE) * number // (_PIECES - 1)
            ours.seek(at)
            theirs.seek(at)
            if ours.read(_PIECE) != theirs.read(_PIECE):
                return False
    return True
