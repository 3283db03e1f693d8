"""An adapter as a folder to give away: its files, and a manifest that says what they are."""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from parent.library.adapters import Shelved
from shared.errors import ErrorCode, refuse
from shared.files import open_regular

MANIFEST = "manifest.json"
_PIECE = 1 << 20


class ExportedFile(msgspec.Struct, frozen=True):
    """One file of an export."""

    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`. `method`: how it was trained, where that was said."""

    version: int = 1
    base_model: str
    adapter: str
    kind: str
    method: str = ""
    rank: int
    scale: float
    modules: int
    files: list[ExportedFile]


def export_adapter(one: Shelved, base_model: str, folder: Path, method: str = "") -> Manifest:
    """Copy an adapter to `folder`, which must not exist yet. Raises `Refused` (conflict, invalid_request)."""
    if one.adapter is None:
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"adapter {one.id} cannot be used: {one.error}", param="adapter_path"
        )
    if folder.exists():
        raise refuse(ErrorCode.CONFLICT, f"{folder} exists; remove it, or move it away")
    scratch = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        sources = [Path(one.adapter.weights), Path(one.adapter.config)]
        files = [_copied(source, scratch / source.name) for source in sources]
        manifest = Manifest(
            base_model=base_model,
            adapter=one.id,
            kind=one.adapter.kind,
            method=method,
            rank=one.adapter.rank,
            scale=one.adapter.scale,
            modules=len(one.adapter.modules),
            files=files,
        )
        (scratch / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        scratch.rename(folder)
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
        raise refuse(ErrorCode.CONFLICT, f"the export was not written: {problem}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _copied(source: Path, target: Path) -> ExportedFile:
    digest, size = hashlib.sha256(), 0
    with open_regular(source) as read, target.open("wb") as write:
        while piece := read.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            write.write(piece)
    return ExportedFile(source.name, size, digest.hexdigest())
