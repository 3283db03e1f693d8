"""The database: transactions, order, schema, damage, a full disk."""

import asyncio
import os
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from parent.db import MIGRATIONS, NAME, Database
from shared.errors import ErrorCode, Refused


def make_notes(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT UNIQUE)")


def add_colour(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE notes ADD COLUMN colour TEXT NOT NULL DEFAULT 'white'")


def put(text: str) -> Callable[[sqlite3.Connection], None]:
    return lambda db: db.execute("INSERT INTO notes (text) VALUES (?)", (text,)) and None


def texts(db: sqlite3.Connection) -> list[str]:
    return [text for (text,) in db.execute("SELECT text FROM notes ORDER BY id")]


def using(folder: Path, work: Callable[[Database], Awaitable[Any]], *migrations: Any) -> Any:
    """`work` over an open database of `folder`, closed afterwards."""

    async def main() -> Any:
        db = Database(folder, migrations or (make_notes,)).open()
        try:
            return await work(db)
        finally:
            await db.close()

    return asyncio.run(main())


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    using(tmp_path, lambda db: db.write(put("a")))
    assert using(tmp_path, lambda db: db.read(texts)) == ["a"]


def test_a_read_sees_every_write_that_returned(tmp_path: Path) -> None:
    async def work(db: Database) -> None:
        for number in range(50):
            await db.write(put(str(number)))
            assert (await db.read(texts))[-1] == str(number)

    using(tmp_path, work)


def test_writes_happen_in_the_order_in_which_they_were_submitted(tmp_path: Path) -> None:
    async def work(db: Database) -> list[str]:
        await asyncio.gather(*(db.submit(put(f"{number:03d}")) for number in range(200)))
        return await db.read(texts)

    assert using(tmp_path, work) == [f"{number:03d}" for number in range(200)]


def test_what_raises_undoes_its_whole_transaction(tmp_path: Path) -> None:
    def half(db: sqlite3.Connection) -> None:
        put("half")(db)
        raise ValueError("no")

    async def work(db: Database) -> list[str]:
        await db.write(put("before"))
        with pytest.raises(ValueError, match="no"):
            await db.write(half)
        with pytest.raises(sqlite3.IntegrityError):
            await db.write(put("before"))
        await db.write(put("after"))
        return await db.read(texts)

    assert using(tmp_path, work) == ["before", "after"]


def test_the_write_of_a_caller_who_was_cancelled_is_done_all_the_same(tmp_path: Path) -> None:
    async def work(db: Database) -> list[str]:
        task = asyncio.ensure_future(db.write(put("asked for")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await db.write(put("next"))
        return await db.read(texts)

    assert using(tmp_path, work) == ["asked for", "next"]


def test_closing_writes_what_was_asked_for_and_refuses_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        db = Database(tmp_path, (make_notes,)).open()
        asked = [db.submit(put(str(number))) for number in range(100)]
        await db.close()
        await asyncio.gather(*asked)
        for late in (db.write(put("late")), db.read(texts)):
            with pytest.raises(Refused) as refused:
                await late
            assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN

    asyncio.run(main())
    assert len(using(tmp_path, lambda db: db.read(texts))) == 100
    assert not (tmp_path / f"{NAME}-wal").exists()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="readonly"):
        using(tmp_path, lambda db: db.read(put("sneaked in")))


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    async def work(db: Database) -> None:
        await db.write(put("private"))
        for file in tmp_path.glob(f"{NAME}*"):  # noqa: ASYNC240  (a test)
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    before = os.umask(0o000)
    try:
        using(tmp_path, work)
    finally:
        os.umask(before)


def test_migrations_go_forward_one_by_one_and_keep_the_rows(tmp_path: Path) -> None:
    using(tmp_path, lambda db: db.write(put("old")))
    rows = using(
        tmp_path,
        lambda db: db.read(lambda c: c.execute("SELECT text, colour FROM notes").fetchall()),
        make_notes,
        add_colour,
    )
    assert rows == [("old", "white")]


def test_a_migration_that_fails_leaves_the_schema_before_it(tmp_path: Path) -> None:
    def broken(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE notes ADD COLUMN half TEXT")
        db.execute("SELECT * FROM nowhere")

    using(tmp_path, lambda db: db.write(put("kept")))
    with pytest.raises(Refused, match="nowhere"):
        Database(tmp_path, (make_notes, broken)).open()
    columns = using(tmp_path, lambda db: db.read(lambda c: c.execute("SELECT * FROM notes").fetchall()))
    assert columns == [(1, "kept")]


def test_a_file_of_a_newer_mlxd_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    using(tmp_path, lambda db: db.write(put("new")), make_notes, add_colour)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(Refused, match=rf"{NAME} is of a newer mlxd \(schema 2, this one knows 1\)"):
        Database(tmp_path, (make_notes,)).open()
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize("damage", ["not a database", "pages"])
def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(tmp_path: Path, damage: str) -> None:
    async def fill(db: Database) -> None:
        await db.write(lambda c: [put("x" * 500 + str(number))(c) for number in range(200)] and None)

    using(tmp_path, fill)
    file = tmp_path / NAME
    whole = file.read_bytes()
    spoilt = b"no SQLite file at all" * 50 if damage == "not a database" else whole[:8192] + b"\xa5" * 60_000
    file.write_bytes(spoilt)

    assert using(tmp_path, lambda db: db.read(texts)) == []
    (kept,) = [path for path in tmp_path.glob(f"{NAME}.broken-*") if not path.name.endswith(("-wal", "-shm"))]
    assert kept.read_bytes() == spoilt
    using(tmp_path, lambda db: db.write(put("anew")))
    assert using(tmp_path, lambda db: db.read(texts)) == ["anew"]


def test_a_full_disk_is_a_refusal_and_what_fits_later_is_written(tmp_path: Path) -> None:
    async def work(db: Database) -> list[str]:
        await db.write(put("before"))
        limit = await db.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        await db.write(lambda c: c.execute(f"PRAGMA max_page_count = {limit + 1}").fetchone())
        with pytest.raises(Refused) as refused:
            await db.write(put("x" * 100_000))
        assert refused.value.failure.code is ErrorCode.DISK_FULL
        assert NAME in str(refused.value)
        await db.write(lambda c: c.execute(f"PRAGMA max_page_count = {limit + 1000}").fetchone())
        await db.write(put("after"))
        return await db.read(texts)

    assert using(tmp_path, work) == ["before", "after"]


def test_closing_does_not_fail_where_the_log_cannot_be_checked_in(tmp_path: Path) -> None:
    def forbid(connection: sqlite3.Connection) -> None:
        connection.set_authorizer(lambda action, *_: int(action == sqlite3.SQLITE_PRAGMA))

    async def work(db: Database) -> None:
        await db.write(put("before"))
        await db.write(forbid)

    using(tmp_path, work)
    assert using(tmp_path, lambda db: db.read(texts)) == ["before"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(Refused, match=str(tmp_path / NAME)):
        Database(tmp_path).open()


def test_a_path_longer_than_sqlite_takes_is_called_that(tmp_path: Path) -> None:
    folder = tmp_path / "/".join(["x" * 100] * 5)
    with pytest.raises(Refused, match="longer than SQLite takes"):
        Database(folder).open()


def test_two_processes_may_bring_the_same_file_to_the_schema(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Database(tmp_path), Database(tmp_path)
        await asyncio.gather(asyncio.to_thread(first.open), asyncio.to_thread(second.open))
        count = await second.read(lambda db: db.execute("PRAGMA user_version").fetchone()[0])
        assert count == len(MIGRATIONS)
        await asyncio.gather(first.close(), second.close())

    asyncio.run(main())
