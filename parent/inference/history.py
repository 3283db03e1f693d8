"""Stored responses: a chain of deltas, each linked to the one before it, so that a client sends only what is new.

A delta is JSON that only its protocol reads. Links are dropped when their time is over, and, least recently used
chains first and in them the oldest links first, when there is no room; a chain through a link that is gone ends
with `not_found`. Times are of the wall clock: a link from the future (the clock was wrong) gets a new full life.
"""

import sqlite3
import time
from collections.abc import Callable

import msgspec

from parent.db import Database
from shared.errors import ErrorCode, Refused, refuse


class HistoryStats(msgspec.Struct, frozen=True):
    """`max_bytes` 0: nothing is stored."""

    entries: int
    bytes: int
    max_bytes: int
    ttl_s: float


class Link(msgspec.Struct, frozen=True):
    """One stored response."""

    id: str
    previous_id: str | None
    model: str
    created_at: float
    delta: bytes


class History:
    """The store. `limits` gives (bytes in all, seconds to live) as they are in force; `clock` the epoch's seconds."""

    def __init__(
        self,
        db: Database,
        limits: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._limits = limits
        self._clock = clock

    async def remember(self, id: str, previous_id: str | None, delta: bytes, model: str) -> bool:
        """Store a response. False where it alone is larger than all that may be stored.

        `previous_id` need not be there any more: the response can then still be read, its chain cannot. Raises
        `Refused` (conflict) for an id that is there, or that another one names as its previous.
        """

        def check(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM responses WHERE id = ?", (id,)).fetchone():
                raise _is_there(id)

        return await self._store(Link(id, previous_id, model, self._clock(), delta), check)

    async def replace(self, id: str, previous_id: str | None, delta: bytes, model: str) -> bool:
        """Store a response in the place of what is there under its id, if anything is.

        False, and nothing is changed, where it is larger than all that may be stored. Raises `Refused` (conflict) where
        another one names it as its previous.
        """
        return await self._store(
            Link(id, previous_id, model, self._clock(), delta),
            lambda db: db.execute("DELETE FROM responses WHERE id = ?", (id,)),
        )

    async def _store(self, link: Link, first: Callable[[sqlite3.Connection], object]) -> bool:
        (most, ttl_s), now = self._limits(), link.created_at
        size = _size(link.id, link.delta)
        if size > most:
            return False

        def store(db: sqlite3.Connection) -> bool:
            _sweep(db, now, ttl_s)
            if (  # a chain must not bite its tail
                link.id == link.previous_id
                or db.execute("SELECT 1 FROM responses WHERE previous_id = ? LIMIT 1", (link.id,)).fetchone()
            ):
                raise _is_there(link.id)
            first(db)
            chain = _numbers(db, link.previous_id)
            used = _next_use(db)
            db.execute(
                "INSERT INTO responses (id, previous_id, model, created_at, expires_at, used, delta, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (link.id, link.previous_id, link.model, now, now + ttl_s, used, link.delta, size),
            )
            _touch(db, chain, used)
            _make_room(db, most)
            return True

        return await self._db.write(store)

    async def expand(self, id: str) -> list[bytes]:
        """The deltas of the chain that ends in `id`, oldest first; it counts as used now.

        Raises `Refused` (not_found) naming the link that is not there.
        """
        (most, ttl_s), now = self._limits(), self._clock()

        def walk(db: sqlite3.Connection) -> list[bytes] | Refused:
            _sweep(db, now, ttl_s)
            _make_room(db, most)
            deltas: list[bytes] = []
            numbers: list[int] = []
            link: str | None = id
            while link is not None:
                row = db.execute(
                    "SELECT number, previous_id, delta FROM responses WHERE id = ?", (link,)
                ).fetchone()
                if row is None:
                    return _no_such(link, id)  # not raised: the sweep stays done
                numbers.append(row[0])
                deltas.append(row[2])
                link = row[1]
            _touch(db, numbers, _next_use(db))
            return deltas[::-1]

        found = await self._db.write(walk)
        if isinstance(found, Refused):
            raise found
        return found

    async def get(self, id: str) -> Link:
        """One link, without its chain and without counting as use. Raises `Refused` (not_found)."""
        (_, ttl_s), now = self._limits(), self._clock()

        def look(db: sqlite3.Connection) -> Link | None:
            row = db.execute(
                "SELECT id, previous_id, model, created_at, delta FROM responses "
                "WHERE id = ? AND MIN(expires_at, ?) > ?",
                (id, now + ttl_s, now),
            ).fetchone()
            return Link(*row) if row else None

        found = await self._db.read(look)
        if found is None:
            raise _no_such(id, id)
        return found

    async def forget(self, id: str) -> None:
        """Delete this link alone: later ones can still be read, but chains through it end with `not_found`.

        Raises `Refused` (not_found).
        """
        gone = await self._db.write(
            lambda db: db.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount
        )
        if not gone:
            raise _no_such(id, id)

    async def stats(self) -> HistoryStats:
        """What is stored, and what may be."""
        most, ttl_s = self._limits()
        entries, held = await self._db.read(
            lambda db: db.execute("SELECT entries, bytes FROM responses_total").fetchone()
        )
        return HistoryStats(entries, held, most, ttl_s)


ROW_BYTES = 100
"""What a row costs beside its delta, about."""
MAX_SHOWN = 80
"""Characters of an id, which may be anything that a client sent."""


def _size(id: str, delta: bytes) -> int:
    return len(delta) + len(id) + ROW_BYTES


def _sweep(db: sqlite3.Connection, now: float, ttl_s: float) -> None:
    """No link outlives now + ttl, also where the clock or the ttl was another when it was stored."""
    db.execute("DELETE FROM responses WHERE expires_at <= ?", (now,))
    db.execute("UPDATE responses SET expires_at = ? WHERE expires_at > ?", (now + ttl_s, now + ttl_s))


def _numbers(db: sqlite3.Connection, last: str | None) -> list[int]:
    """The rows of the chain that ends in `last`, as far as it is there."""
    numbers: list[int] = []
    while last is not None:
        row = db.execute("SELECT number, previous_id FROM responses WHERE id = ?", (last,)).fetchone()
        if row is None:
            break
        numbers.append(row[0])
        last = row[1]
    return numbers


def _next_use(db: sqlite3.Connection) -> int:
    """A counter, so that the order of use does not depend on a clock."""
    (last,) = db.execute("SELECT COALESCE(MAX(used), 0) FROM responses").fetchone()
    return int(last) + 1


def _touch(db: sqlite3.Connection, numbers: list[int], used: int) -> None:
    db.executemany("UPDATE responses SET used = ? WHERE number = ?", [(used, number) for number in numbers])


def _make_room(db: sqlite3.Connection, most: int) -> None:
    """A chain was used at one time as a whole, so this goes chain by chain; in each the oldest link is first."""
    while True:
        (held,) = db.execute("SELECT bytes FROM responses_total").fetchone()
        if held <= most:
            return
        db.execute(
            "DELETE FROM responses WHERE number = (SELECT number FROM responses ORDER BY used, number LIMIT 1)"
        )


def _is_there(id: str) -> Refused:
    return refuse(ErrorCode.CONFLICT, f"there is a response {id} already")


def _no_such(link: str, asked: str) -> Refused:
    through = "" if link == asked else f", which {asked} follows on"
    link = link[:MAX_SHOWN]
    return refuse(
        ErrorCode.NOT_FOUND,
        f"there is no response {link}{through}: it has expired, was deleted, or was not stored",
    )
