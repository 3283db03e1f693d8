"""The parent's database, `mlxd.sqlite` in the data folder: one writer, one reader, migrations that only go forward.

Both run in threads of their own, so the event loop never waits for a disk. What is written is in the file when
`write` returns: a killed parent loses nothing, a power cut at most the last moments, and neither damages it.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shared.errors import ErrorCode, Refused, refuse
from shared.logs import event

log = logging.getLogger(__name__)
NAME = "mlxd.sqlite"
LONGEST_PATH = 500  # bytes; SQLite takes 512, and adds to the name itself
BUSY_S = 5.0  # how long another program (a backup, the sqlite3 shell) may hold the file
CHECKED_BYTES = 16 << 20  # a larger file is checked through only once it was found damaged
T = TypeVar("T")
Migration = Callable[[sqlite3.Connection], None]


def _jobs(db: sqlite3.Connection) -> None:
    db.execute(
        """
        CREATE TABLE jobs (
            id TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL,
            exclusive TEXT NOT NULL DEFAULT '',
            state TEXT NOT NULL, verdict TEXT,
            created_at REAL NOT NULL, started_at REAL, ended_at REAL,
            stage TEXT NOT NULL DEFAULT '', done INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
            message TEXT NOT NULL DEFAULT '',
            attempt INTEGER NOT NULL DEFAULT 0, orphaned INTEGER NOT NULL DEFAULT 0,
            fruitless INTEGER NOT NULL DEFAULT 0, retry_at REAL,
            owner_pid INTEGER, owner_started REAL,
            output TEXT NOT NULL DEFAULT '', error TEXT, resume TEXT NOT NULL DEFAULT '', rerun_of TEXT
        )
        """
    )
    over = "('done', 'failed', 'cancelled', 'lost')"
    db.execute(
        f"CREATE UNIQUE INDEX jobs_one_at_a_time ON jobs (exclusive) WHERE exclusive != '' AND state NOT IN {over}"
    )
    db.execute(
        f"""
        CREATE TRIGGER jobs_end_once BEFORE UPDATE OF state ON jobs WHEN OLD.state IN {over}
        BEGIN SELECT RAISE(ABORT, 'the job is over'); END
        """
    )
    db.execute(
        """
        CREATE TABLE job_events (
            job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            seq INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL,
            PRIMARY KEY (job_id, seq)
        ) WITHOUT ROWID
        """
    )


def _responses(db: sqlite3.Connection) -> None:
    db.execute(
        """
        CREATE TABLE responses (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE, previous_id TEXT, model TEXT NOT NULL,
            created_at REAL NOT NULL, expires_at REAL NOT NULL, used INTEGER NOT NULL,
            delta BLOB NOT NULL, bytes INTEGER NOT NULL
        )
        """
    )
    db.execute("CREATE INDEX responses_by_previous ON responses (previous_id)")
    db.execute("CREATE INDEX responses_by_expiry ON responses (expires_at)")
    db.execute("CREATE INDEX responses_by_use ON responses (used, number)")
    # The sum of a million rows is not for every request: triggers keep it.
    db.execute("CREATE TABLE responses_total (entries INTEGER NOT NULL, bytes INTEGER NOT NULL)")
    db.execute("INSERT INTO responses_total VALUES (0, 0)")
    for what, row, sign in (("INSERT", "NEW", "+"), ("DELETE", "OLD", "-")):
        db.execute(
            f"""
            CREATE TRIGGER responses_{what.lower()} AFTER {what} ON responses BEGIN
            UPDATE responses_total SET entries = entries {sign} 1, bytes = bytes {sign} {row}.bytes; END
            """
        )


def _jobs_that_are_taken_over(db: sqlite3.Connection) -> None:
    for column in (
        "heard INTEGER NOT NULL DEFAULT 0",
        "worker TEXT NOT NULL DEFAULT ''",
        "needs INTEGER NOT NULL DEFAULT 0",
        "peak_bytes INTEGER NOT NULL DEFAULT 0",
        "saved_step INTEGER NOT NULL DEFAULT 0",
        "heartbeat_at REAL",
        "pinned INTEGER NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE jobs ADD COLUMN {column}")


def _evaluations(db: sqlite3.Connection) -> None:
    db.execute(
        """
        CREATE TABLE evaluations (
            number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL, model TEXT NOT NULL, what TEXT NOT NULL,
            numbers TEXT NOT NULL, details TEXT NOT NULL, summary TEXT NOT NULL,
            at REAL NOT NULL, versions TEXT NOT NULL
        )
        """
    )
    db.execute("CREATE INDEX evaluations_by_model ON evaluations (model, at)")


MIGRATIONS: tuple[Migration, ...] = (_jobs, _responses, _jobs_that_are_taken_over, _evaluations)
"""In order, each run once in a transaction of its own. Append; never edit one that was released."""


class Database:
    """`open` it, `write` and `read`, `close` it. Functions get a connection and must not keep it."""

    def __init__(self, data_dir: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self.path = data_dir / NAME
        self.set_aside: Path | None = None  # where `open` put a damaged file
        self._migrations = migrations
        self._damaged = data_dir / f"{NAME}-damaged"  # says so to the next `open`
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._write_thread = ThreadPoolExecutor(1, "db-write")
        self._read_thread = ThreadPoolExecutor(1, "db-read")

    def open(self) -> "Database":
        """Open or make the file, and bring it to our schema. A damaged one is kept under another name.

        Raises `Refused`: the file is of a newer mlxd, cannot be written, or the disk is full.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                self._shut()
                if not _is_damage(error):
                    raise
                self._move_aside(str(error))
                self._open()
        except (sqlite3.Error, OSError) as error:
            self._shut()
            raise self._refusal(error) from None
        except Refused:
            self._shut()
            raise
        return self

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """`write` for those who cannot wait: it is in the writer's line when this returns."""
        return self._run(self._write_thread, lambda: self._transact(self._writer, "BEGIN IMMEDIATE", work))

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction; what it returns, once that is committed. What it raises undoes it all.

        Once asked for it is done, even where the caller is cancelled. Raises `Refused` (disk_full, …) for what
        SQLite cannot do.
        """
        return await asyncio.shield(self.submit(work))

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` over one snapshot, which holds every write that has returned."""
        return await self._run(self._read_thread, lambda: self._transact(self._reader, "BEGIN", work))

    async def close(self) -> None:
        """What was asked for is written first; then everything is refused (shutting_down). Never fails."""
        with contextlib.suppress(Refused):
            await asyncio.shield(self._run(self._write_thread, self._checkpoint))
        for thread in (self._read_thread, self._write_thread):
            await asyncio.to_thread(thread.shutdown)
        self._shut()

    def _run(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> "asyncio.Future[T]":
        try:
            return asyncio.get_running_loop().run_in_executor(thread, work)
        except RuntimeError:  # the thread takes nothing more
            raise _closed() from None

    def _transact(
        self, db: sqlite3.Connection | None, begin: str, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        if db is None:
            raise _closed()
        try:
            db.execute(begin)
            try:
                result = work(db)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            return result
        except sqlite3.IntegrityError:
            raise  # a constraint: the caller's to know
        except sqlite3.Error as error:
            if _is_damage(error):
                event(log, "db.damaged", level=logging.ERROR, file=str(self.path), error=str(error))
                with contextlib.suppress(OSError):
                    self._damaged.touch(mode=0o600)
            raise self._refusal(error) from None

    def _open(self) -> None:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(self.path, 0o600)  # -wal and -shm get the same
        suspect = self._damaged.exists()
        self._writer = db = _connect(self.path)
        _to_wal(db)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        if suspect or self.path.stat().st_size <= CHECKED_BYTES:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise _Damaged(found)
        self._damaged.unlink(missing_ok=True)
        self._migrate(db)
        self._reader = _connect(self.path)
        self._reader.execute("PRAGMA query_only = ON")

    def _migrate(self, db: sqlite3.Connection) -> None:
        known = len(self._migrations)
        while True:
            db.execute("BEGIN IMMEDIATE")  # another process may be at it
            try:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version < known:
                    self._migrations[version](db)
                    db.execute(f"PRAGMA user_version = {version + 1}")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            if version > known:
                raise refuse(
                    ErrorCode.UNSUPPORTED,
                    f"{self.path} is of a newer mlxd (schema {version}, this one knows {known}); install the "
                    "newer one again, or move the file away to begin without it",
                )
            if version >= known:
                return

    def _move_aside(self, reason: str) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = self.path.with_name(f"{NAME}.broken-{stamp}")
        number = 1
        while target.exists():
            number += 1
            target = self.path.with_name(f"{NAME}.broken-{stamp}-{number}")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{target}{suffix}")
        self.set_aside = target
        event(
            log,
            "db.set_aside",
            level=logging.ERROR,
            file=str(self.path),
            kept_as=str(target),
            error=reason,
            advice=f"jobs and stored responses begin anew; `sqlite3 {target} .recover` may read the old ones",
        )

    def _checkpoint(self) -> None:
        """The log into the file, where the disk allows; else the next `open` reads it from the log."""
        try:
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            event(log, "db.not_checkpointed", level=logging.WARNING, file=str(self.path), reason=str(error))

    def _shut(self) -> None:
        for db in (self._reader, self._writer):
            if db is not None:
                with contextlib.suppress(sqlite3.Error):  # closing the last one checks in what is left
                    db.close()
        self._reader = self._writer = None

    def _refusal(self, error: Exception) -> Refused:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", 0) in (28, 122):  # ENOSPC, EDQUOT
            return refuse(ErrorCode.DISK_FULL, f"the disk of {self.path} is full; free some room, then again")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return refuse(ErrorCode.CONFLICT, f"another program holds {self.path}; end it, then again")
        if _is_damage(error):
            said = f"{self.path} is damaged ({error}); restart mlxd: it keeps the file aside and begins a new one"
            return refuse(ErrorCode.INTERNAL, said)
        said = "see to its rights and its disk"
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            said = f"its path is longer than SQLite takes ({LONGEST_PATH} bytes); choose a data_dir higher up"
        return refuse(ErrorCode.FORBIDDEN, f"cannot use {self.path}: {error}; {said}")


def _to_wal(db: sqlite3.Connection) -> None:
    """SQLite does not wait by itself where another process does the same just now."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


class _Damaged(sqlite3.DatabaseError):
    """What the check of the file found."""


def _connect(path: Path) -> sqlite3.Connection:
    """Transactions are ours to begin; a connection is used by its one thread, and closed by another."""
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _is_damage(error: Exception) -> bool:
    if isinstance(error, _Damaged):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _closed() -> Refused:
    return refuse(ErrorCode.SHUTTING_DOWN, "the database is closed: the server is leaving")
