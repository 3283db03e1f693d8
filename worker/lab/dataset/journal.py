"""What units have come to, kept on disk as they end: a job that was killed goes on with those that are missing."""

from pathlib import Path

import msgspec

from worker.lab.dataset.form import Made

NAME = "units.jsonl"


class _Head(msgspec.Struct, frozen=True):
    digest: str


class _Line(msgspec.Struct, frozen=True):
    unit: int
    made: Made


_head = msgspec.json.Decoder(_Head).decode
_line = msgspec.json.Decoder(_Line).decode


class Journal:
    """One file. `digest`: of what the units depend on; a file of another one is begun anew. `started_over`: it was."""

    def __init__(self, folder: Path, digest: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self.done: dict[int, Made] = {}
        self.started_over = False
        good = self._read(digest)
        self._file = self.path.open("r+b" if good else "wb", buffering=0)
        if good:
            self._file.truncate(good)  # a line that a kill cut off
            self._file.seek(good)
        else:
            self._file.write(msgspec.json.encode(_Head(digest)) + b"\n")

    def _read(self, digest: str) -> int:
        """-> how many bytes are good."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return 0
        good = 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                if not good:
                    if _head(line).digest != digest:
                        self.started_over = True
                        return 0
                else:
                    found = _line(line)
                    self.done[found.unit] = found.made
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
            good += len(line)
        return good

    def add(self, unit: int, made: Made) -> None:
        """Keep what came of a unit. Raises OSError."""
        self.done[unit] = made
        line = msgspec.json.encode(_Line(unit, made)) + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
