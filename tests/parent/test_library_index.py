"""The index: changed models are read again, others are not, and nothing that happens to its file matters."""

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from parent.config import Settings
from parent.library.index import Index
from parent.library.library import Library
from parent.library.signature import signature_of
from tests.parent.models import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny", card={"aliases": ["t"]})


def library(data: Path) -> Library:
    return Library(lambda: Settings(data_dir=data, hf_cache="none"), dict)


def scanned(data: Path) -> Library:
    made = library(data)
    made.scan()
    return made


def rewrite(file: Path, content: bytes) -> None:
    """Other content of the same length, with the time of before: only an index would not see it."""
    before = file.stat()
    assert len(content) == before.st_size
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_headers_of_unchanged_models_are_not_read_again(tmp_path: Path, folder: Path) -> None:
    (first,) = scanned(tmp_path).entries
    size = (folder / "model.safetensors").stat().st_size
    rewrite(folder / "model.safetensors", b"\xff" * size)
    assert scanned(tmp_path).entries == [first]
    assert first.config["hidden_size"] == 64
    (tmp_path / "library.sqlite").unlink()
    assert "model.safetensors" in scanned(tmp_path).entries[0].error


def test_an_index_that_says_nonsense_of_a_changed_model_is_not_believed(tmp_path: Path, folder: Path) -> None:
    (before,) = scanned(tmp_path).entries
    write_model(folder, hidden_size=32)
    os.utime(folder / "config.json", ns=(5, 5))
    made = scanned(tmp_path)
    assert made.entries[0].config["hidden_size"] == 32
    assert made.entries[0].signature != before.signature


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_is_replaced_has_another_signature(folder: Path, name: str) -> None:
    before = signature_of(folder)
    assert signature_of(folder) == before
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    assert signature_of(folder).model != before.model
    (folder / name).write_bytes(content + b" ")
    assert signature_of(folder).model != before.model
    (folder / name).write_bytes(content)
    os.utime(folder / name, ns=(7, 7))
    assert signature_of(folder).model != before.model
    assert signature_of(folder).card == before.card


def test_another_name_on_the_card_is_seen_but_no_other_model(tmp_path: Path, folder: Path) -> None:
    (before,) = scanned(tmp_path).entries
    (folder / "mlxd.json").write_text('{"aliases": ["another"]}')
    (after,) = scanned(tmp_path).entries
    assert after.aliases == ["another"]
    assert after.signature == before.signature


def test_what_was_broken_is_looked_at_again(tmp_path: Path, folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.unlink()
    assert scanned(tmp_path).entries[0].error
    tokenizer.write_text("{}")
    assert scanned(tmp_path).entries[0].error == ""


def test_a_scan_says_whether_something_changed(tmp_path: Path, folder: Path) -> None:
    made = library(tmp_path)
    assert made.scan()
    assert not made.scan()
    write_model(tmp_path / "models" / "other")
    assert made.scan()
    (folder / "config.json").write_text("{")
    assert made.scan()
    assert not made.scan()


def test_rows_of_folders_that_are_gone_are_dropped(tmp_path: Path, folder: Path) -> None:
    scanned(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert scanned(tmp_path).entries == []
    with sqlite3.connect(tmp_path / "library.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (0,)
    connection.close()


def statement(sql: str) -> Callable[[Path], object]:
    def spoil(file: Path) -> None:
        connection = sqlite3.connect(file)
        connection.execute(sql)
        connection.commit()
        connection.close()

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"not a database at all" * 100),
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.write_bytes(file.read_bytes()[:4096] + b"\x07" * 9000),
        lambda file: file.write_bytes(b""),
        statement("PRAGMA user_version = 99"),
        statement("UPDATE form SET hash = 'older'"),
        statement("DELETE FROM form"),
        statement("DROP TABLE entries"),
        statement("UPDATE entries SET entry = x'00'"),
        statement("UPDATE entries SET entry = '{\"id\": 5}'"),
    ],
    ids=[
        "garbage",
        "cut",
        "pages",
        "empty",
        "layout",
        "form",
        "no form",
        "no table",
        "no json",
        "other struct",
    ],
)
def test_a_damaged_or_older_index_is_made_anew_without_a_word_to_anybody(
    tmp_path: Path, folder: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    (before,) = scanned(tmp_path).entries
    spoil(tmp_path / "library.sqlite")
    with caplog.at_level(logging.INFO):
        assert scanned(tmp_path).entries == [before]
    assert len(caplog.records) <= 1
    index = Index(tmp_path)
    assert index.find(folder, signature_of(folder)) == before
    index.close()


def test_without_a_place_for_the_index_the_library_works(tmp_path: Path) -> None:
    (tmp_path / "library.sqlite").mkdir()
    write_model(tmp_path / "models" / "tiny")
    assert [entry.id for entry in scanned(tmp_path).entries] == ["tiny"]
    assert scanned(tmp_path / "nowhere").entries == []
    assert not (tmp_path / "nowhere").exists()


def test_an_index_that_another_process_holds_is_done_without(tmp_path: Path, folder: Path) -> None:
    (before,) = scanned(tmp_path).entries
    other = sqlite3.connect(tmp_path / "library.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    index = Index(tmp_path, busy_s=0.0)
    assert index.find(folder, signature_of(folder)) is None
    index.keep(folder, signature_of(folder), before)
    index.close()
    other.execute("ROLLBACK")
    other.close()
    assert scanned(tmp_path).entries == [before]
