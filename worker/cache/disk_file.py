"""One entry of the prefix cache as a file: safetensors, named after the hash of all that is in it.

The metadata describe the entry, so that a folder of such files is known from their headers; the arrays are read,
and the hash is compared, when the entry is first used. A file appears whole or not at all.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from shared.errors import Refused
from shared.tensor_headers import read_header
from worker.cache.kv import LayerState
from worker.cache.layers import empty_like

SUFFIX = ".kv.safetensors"
PART = ".part-"
PIECE = 8 << 20  # between two looks at the clock
SYNC = 64 << 20  # so that the last fsync, which nobody can interrupt, is short
_KEY = "entry"

Write = Callable[[int, memoryview], int]

_save: Any = mx.save_safetensors  # typed for whole files; it only writes


class About(msgspec.Struct, frozen=True):
    """What a file says of its entry. `identity`: of the model, dtype and device that made it."""

    identity: str
    ids: list[int]
    planned: int
    layers: list[LayerState]

    def empty_caches(self) -> list[Any]:
        """Caches in the state of the entry, without their arrays."""
        caches = [empty_like(state) for state in self.layers]
        for cache in caches:
            cache.planned = self.planned
        return caches


class Damaged(Exception):
    """A file that cannot be used as it is; says why."""


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_header = msgspec.json.Decoder(_Header)
_about = msgspec.json.Decoder(About)


def most_bytes(about: About, arrays: dict[str, mx.array]) -> int:
    """The most that the file of an entry will take."""
    header = len(msgspec.json.encode(about)) * 2 + 256 * (len(arrays) + 1)  # quotes in quotes are escaped
    return header + sum(array.nbytes for array in arrays.values())


def arrays_of(caches: list[Any]) -> dict[str, mx.array]:
    """What the file of an entry has to hold: the tokens in use, by name."""
    arrays: dict[str, mx.array] = {}
    for place, cache in enumerate(caches):
        cut = cache.clone()
        cut.cut()
        for number, array in enumerate(cut.arrays()):
            arrays[f"{place}.{number}"] = array
    return arrays


def write(
    folder: Path, about: About, arrays: dict[str, mx.array], *, check: Callable[[], None], put: Write
) -> tuple[Path, int]:
    """Write an entry -> (its file, its bytes). Call it on the thread that owns the arrays.

    `check` is called every few megabytes and may raise to stop it, `put` is `os.write`. Raises OSError; of a file
    that was not finished nothing is left.
    """
    part = folder / f"{PART}{os.getpid()}"
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            writer = _Writer(fd, check, put)
            _save(writer, arrays, {_KEY: msgspec.json.encode(about).decode()})
            os.fsync(fd)
        finally:
            os.close(fd)
        path = folder / f"{writer.digest()}{SUFFIX}"
        part.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return path, writer.size


def describe(path: Path) -> tuple[About, int]:
    """-> (what the header says, bytes of the arrays). Raises Damaged, OSError."""
    try:
        tensors = read_header(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            about = _about.decode(_header.decode(file.read(length)).metadata.get(_KEY, ""))
        names = _names(tensors)
        for place, (state, cache) in enumerate(zip(about.layers, about.empty_caches(), strict=True)):
            shapes = [list(tensors[name].shape) for name in names.get(place, [])]
            if not cache.holds(shapes):
                raise Damaged(f"layer {place} has arrays of {shapes}")
            if state.offset != len(about.ids):
                raise Damaged(f"layer {place} holds {state.offset} tokens of {len(about.ids)}")
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        size = path.stat().st_size
    except (Refused, ValueError, KeyError, msgspec.MsgspecError) as error:
        raise Damaged(f"its header cannot be used ({error})") from None
    if size != 8 + length + num_bytes:
        raise Damaged(f"it has {size} bytes and its header tells of {8 + length + num_bytes}")
    return about, num_bytes


def fill(path: Path, caches: list[Any]) -> None:
    """Read the arrays into the caches that `describe` gave. Raises Damaged where a byte is not as it was written."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    if path.name != f"{digest.hexdigest()}{SUFFIX}":
        raise Damaged("its checksum is not the one it was written with")
    try:
        arrays = mx.load(str(path), format="safetensors")
        assert isinstance(arrays, dict)
        mx.eval(list(arrays.values()))
    except RuntimeError as error:
        raise Damaged(f"it cannot be read ({str(error).splitlines()[0]})") from None
    names = _names(arrays)
    for place, cache in enumerate(caches):
        cache.fill([arrays[name] for name in names.get(place, [])])


def _names(tensors: Iterable[str]) -> dict[int, list[str]]:
    """The tensors of each layer, in order. Raises ValueError for a name that is none of ours."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in tensors:
        place, _, number = name.partition(".")
        found.setdefault(int(place), []).append((int(number), name))
    return {place: [name for _, name in sorted(entries)] for place, entries in found.items()}


class _Writer:
    """The file object that mlx writes to: bounded pieces, hashed on the way."""

    closed = False

    def __init__(self, fd: int, check: Callable[[], None], put: Write) -> None:
        self._fd, self._check, self._put = fd, check, put
        self._hash = blake2b(digest_size=16)
        self._unsynced = 0
        self.size = 0

    def write(self, data: memoryview) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE):
            self._check()
            self._piece(view[at : at + PIECE])
        return len(view)

    def _piece(self, piece: memoryview) -> None:
        self._hash.update(piece)
        self.size += len(piece)
        self._unsynced += len(piece)
        while piece:
            written = self._put(self._fd, piece)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            piece = piece[written:]
        if self._unsynced >= SYNC:
            os.fsync(self._fd)
            self._unsynced = 0

    def tell(self) -> int:
        return self.size

    def seek(self, offset: int, whence: int = 0) -> int:
        raise OSError("this file is written from its beginning to its end")

    def digest(self) -> str:
        return self._hash.hexdigest()
