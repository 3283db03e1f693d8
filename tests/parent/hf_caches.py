"""A Hugging Face hub cache as the hub's own programs lay it out: blobs, links to them, refs."""

import hashlib
import os
from pathlib import Path
from typing import Any

from tests.parent.models import write_model


class HfCache:
    """Builds `models--ORG--NAME` folders in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def repo(self, model: str) -> Path:
        return self.root / ("models--" + model.replace("/", "--"))

    def commit(self, model: str, commit: str, *, ref: str = "", at: float = 1.0, **write: Any) -> Path:
        """A whole snapshot of a tiny model, `at`: when it was made, in seconds."""
        files = write_model(self.root / ".made", **write)
        for file in sorted(files.iterdir()):
            self.file(model, commit, file.name, file.read_bytes())
            file.unlink()
        files.rmdir()
        if ref:
            self.ref(model, ref, commit)
        snapshot = self.snapshot(model, commit)
        os.utime(snapshot, (at, at))
        return snapshot

    def snapshot(self, model: str, commit: str) -> Path:
        return self.repo(model) / "snapshots" / commit

    def ref(self, model: str, name: str, commit: str) -> None:
        file = self.repo(model) / "refs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)

    def file(self, model: str, commit: str, name: str, content: bytes) -> Path:
        """A downloaded file: its blob, and the link to it."""
        blob = self.repo(model) / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.write_bytes(content)
        link = self.snapshot(model, commit) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def incomplete(self, model: str, name: str = "0" * 64) -> Path:
        """A blob whose download runs, or was cut."""
        blob = self.repo(model) / "blobs" / f"{name}.incomplete"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"half")
        return blob
