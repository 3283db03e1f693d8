"""A block of a prompt as a file: safetensors, its name made of what it is and of the hash of all that is in it.

`IDENTITY-NAME-DIGEST.KIND.safetensors`: the model state that computed it (8 digits), the block's name in its chain,
the checksum. KIND is `kv` for keys and values of the block's tokens, `state` for what layers that cannot go back knew
at its end. A file appears whole or not at all.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from worker.cache.kv import LayerState

PART = ".part-"
PIECE = 8 << 20  # between two looks at whether to stop
Kind = Literal["kv", "state"]
Write = Callable[[int, memoryview], int]

_NAME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{32})-([0-9a-f]{32})\.(kv|state)\.safetensors")
_KEY = "layers"
_layers = msgspec.json.Decoder(dict[int, LayerState])


class Damaged(Exception):
    """A file that cannot be used as it is; says why."""


class Tensor(msgspec.Struct, frozen=True):
    """Bytes of an array in host memory, with its safetensors dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Name:
    """What the name of a file says."""

    identity: str
    block: str
    digest: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.identity}-{self.block}-{self.digest}.{self.kind}.safetensors"


def parse(name: str) -> Name | None:
    """The parts of a file's name; None for one that is not ours."""
    found = _NAME.fullmatch(name)
    return Name(found[1], found[2], found[3], found[4]) if found else None  # type: ignore[arg-type]


def write(
    folder: Path,
    identity: str,
    block: str,
    kind: Kind,
    layers: dict[int, LayerState],
    tensors: list[Tensor],
    *,
    put: Write = os.write,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write a block -> its file. `check` may raise to stop it. Raises OSError, and leaves nothing unfinished then."""
    part = folder / f"{PART}{os.getpid()}"
    part.unlink(missing_ok=True)
    digest = blake2b(digest_size=16)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            for data in (memoryview(_header(layers, tensors)), *(tensor.data for tensor in tensors)):
                for at in range(0, len(data), PIECE):
                    check()
                    piece = data[at : at + PIECE]
                    digest.update(piece)
                    _put(fd, piece, put)
            os.fsync(fd)
        finally:
            os.close(fd)
        path = folder / str(Name(identity, block, digest.hexdigest(), kind))
        part.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return path


def verify(path: Path, digest: str) -> dict[int, LayerState]:
    """Read a whole file and compare -> the layers in it. Raises Damaged, OSError."""
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
        if found.hexdigest() != digest:
            raise Damaged("its checksum is not the one it was written with")
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
    try:
        return _layers.decode(msgspec.json.decode(header)["__metadata__"][_KEY])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise Damaged(f"its header cannot be used ({error})") from None


def size_of(tensors: list[Tensor]) -> int:
    """Bytes of the file that these make, within a page or so."""
    return sum(len(tensor.data) for tensor in tensors) + 256 * (len(tensors) + 1)


def _header(layers: dict[int, LayerState], tensors: list[Tensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {_KEY: msgspec.json.encode(layers).decode()}}
    at = 0
    for tensor in tensors:
        end = at + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(fd: int, piece: memoryview, put: Write) -> None:
    while piece:
        written = put(fd, piece)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece = piece[written:]
