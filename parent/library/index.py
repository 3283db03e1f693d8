"""`library.sqlite` in the data folder: what was read of each model, so that only changed ones are read again.

It is never trusted over the disk: an entry counts only with the very signature that the folder has now. Of
another version, or damaged, it is dropped and made anew; where it cannot be written we work without it.
"""

import hashlib
import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from parent.library.catalog import ModelEntry, runs_in_float32
from parent.library.families import FAMILIES
from parent.library.signature import Signature
from parent.values import as_path
from shared.providers import mlx_lm_version
from shared.version import VERSION

LAYOUT = 1
_log = logging.getLogger(__name__)


def form() -> str:
    """What an entry depends on beside the files: its Struct, this version, its families, mlx-lm's, this platform."""
    schema = msgspec.json.encode(msgspec.json.schema(ModelEntry, schema_hook=lambda kind: {"type": "string"}))
    rest = f"{VERSION} {FAMILIES} {mlx_lm_version()} {runs_in_float32()}".encode()
    return hashlib.sha256(schema + rest).hexdigest()


class Index:
    """The index of a data folder for one scan. Close it. No method ever raises for what is wrong with the file."""

    def __init__(self, data_dir: Path, *, busy_s: float = 2.0) -> None:
        self.file = data_dir / "library.sqlite"
        self._was_damaged = False
        self._busy_s = busy_s
        self._connection: sqlite3.Connection | None = None
        if os.path.isdir(data_dir):  # looking at the library must not make the data folder
            self._connection = _opened(self.file, busy_s)

    def find(self, path: Path, signature: Signature) -> ModelEntry | None:
        """What was read of the folder when it had this signature."""
        try:
            rows = self._run(
                "SELECT card, entry FROM entries WHERE path = ? AND model = ?", path, signature.model
            )
            if rows and rows[0][0] == signature.card:
                return msgspec.json.decode(rows[0][1], type=ModelEntry, dec_hook=as_path)
        except (msgspec.MsgspecError, ValueError) as error:
            self._drop(error)
        return None

    def keep(self, path: Path, signature: Signature, entry: ModelEntry) -> None:
        """Remember what was read of the folder."""
        try:
            encoded = msgspec.json.encode(entry, enc_hook=str)
        except ValueError:  # a path that is not UTF-8
            return
        self._run(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
            path,
            signature.model,
            signature.card,
            encoded,
        )

    def forget_absent(self) -> None:
        """Drop the rows of folders that are no more."""
        for (path,) in self._run("SELECT path FROM entries"):
            if not os.path.isdir(path):
                self._run("DELETE FROM entries WHERE path = ?", path)

    def close(self) -> None:
        """Write what is kept."""
        if self._connection is not None:
            try:
                self._connection.commit()
            except sqlite3.Error as error:
                self._drop(error)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str, *values: Path | str | bytes) -> list[Any]:
        if self._connection is None:
            return []
        try:
            plain = [str(value) if isinstance(value, Path) else value for value in values]
            return self._connection.execute(statement, plain).fetchall()
        except (sqlite3.Error, UnicodeEncodeError) as error:
            self._drop(error)
            return []

    def _drop(self, error: Exception) -> None:
        """A damaged file is made anew; whatever else is wrong, this scan goes on without."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not isinstance(error, sqlite3.OperationalError | UnicodeEncodeError) and not self._was_damaged:
            self._was_damaged = True
            _remove(self.file, str(error))
            self._connection = _opened(self.file, self._busy_s)


def _opened(file: Path, busy_s: float) -> sqlite3.Connection | None:
    """A connection to an index of this form; None where there can be none."""
    for _ in range(2):  # what is there, then a new one
        try:
            connection = sqlite3.connect(file, timeout=busy_s, check_same_thread=False)
        except sqlite3.Error:
            return None
        try:
            if problem := _prepared(connection):
                connection.close()
                _remove(file, problem)
                continue
            return connection
        except (
            sqlite3.OperationalError
        ) as error:  # locked, read only, no room: nothing is wrong with the file
            connection.close()
            _log.info("the library works without its index %s: %s", file, error)
            return None
        except sqlite3.DatabaseError as error:
            connection.close()
            _remove(file, str(error))
    return None


def _prepared(connection: sqlite3.Connection) -> str:
    """Make the tables of a new file; what is wrong with an old one, "" for nothing."""
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables and not layout:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE form (hash TEXT NOT NULL)")
        connection.execute(
            "CREATE TABLE entries (path TEXT PRIMARY KEY, model TEXT NOT NULL, card TEXT NOT NULL, entry BLOB NOT NULL)"
        )
        connection.execute("INSERT INTO form VALUES (?)", [form()])
        connection.execute(f"PRAGMA user_version = {LAYOUT}")
        connection.commit()
        return ""
    if layout != LAYOUT or not {"form", "entries"} <= tables:
        return f"it has layout {layout}"
    row = connection.execute("SELECT hash FROM form").fetchone()
    return "" if row and row[0] == form() else "it is of another version"


def _remove(file: Path, reason: str) -> None:
    _log.info("the index %s is made anew: %s", file, reason)
    for name in (file.name, f"{file.name}-journal", f"{file.name}-wal", f"{file.name}-shm"):
        with suppress(OSError):
            file.with_name(name).unlink()
