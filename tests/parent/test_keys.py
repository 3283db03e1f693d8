"""Keys: who comes in, and what the file of them is worth when it is damaged, changed or written by two at once."""

import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent import keys
from parent.keys import Door
from shared.errors import ErrorCode, Refused

OWN = "a-key-of-one's-own"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode("latin-1"))]


def test_without_keys_everybody_may_ask(tmp_path: Path) -> None:
    door = Door(tmp_path / "not there")
    assert door.refusal("/v1/models", []) is None
    assert door.refusal("/v1/models", bearer("any")) is None
    assert keys.local_key(tmp_path) == ""


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ([], False),
        (bearer(OWN), True),
        ([(b"authorization", f"bearer  {OWN} ".encode())], True),
        ([(b"x-api-key", OWN.encode())], True),
        ([(b"x-api-key", b""), *bearer(OWN)], True),
        ([(b"x-api-key", b"wrong"), *bearer(OWN)], True),
        (bearer(OWN[:-1]), False),
        (bearer(OWN.upper()), False),
        (bearer(""), False),
        ([(b"authorization", OWN.encode())], False),
        ([(b"authorization", f"Basic {OWN}".encode())], False),
        ([(b"cookie", OWN.encode())], False),
        ([(b"authorization", b"Bearer \xff\xfe")], False),
    ],
)
def test_with_a_key_only_its_holders_may(
    tmp_path: Path, headers: list[tuple[bytes, bytes]], is_in: bool
) -> None:
    door = Door(tmp_path)
    assert keys.add(tmp_path, "me", OWN) == OWN
    refusal = door.refusal("/v1/models", headers)
    assert (refusal is None) == is_in
    if refusal is not None:
        assert refusal.code is ErrorCode.UNAUTHORIZED


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/", True),
        ("/health", True),
        ("/ready", True),
        ("/static/chat.js", True),
        ("/static", False),
        ("//", False),
        ("/health/", False),
        ("/v1/chat/completions", False),
        ("/admin/config", False),
        ("/api/tags", False),
        ("/openapi.json", False),
        ("/no-such-path", False),
    ],
)
def test_what_is_open_to_all(tmp_path: Path, path: str, is_open: bool) -> None:
    keys.add(tmp_path, "me")
    assert (Door(tmp_path).refusal(path, []) is None) == is_open


def test_keys_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    door = Door(tmp_path)
    one, two = keys.add(tmp_path, "one"), keys.add(tmp_path, "two")
    assert one != two
    local = keys.local_key(tmp_path)
    for key in (one, two, local):
        assert door.refusal("/running", bearer(key)) is None
    assert keys.remove(tmp_path, "one") == 1
    assert door.refusal("/running", bearer(one)) is not None
    assert door.refusal("/running", bearer(two)) is None
    assert keys.remove(tmp_path, "two") == 0
    assert door.refusal("/running", []) is None
    assert keys.local_key(tmp_path) == ""


def test_the_file_is_private_and_holds_no_key(tmp_path: Path) -> None:
    made = keys.add(tmp_path, "me")
    file = tmp_path / keys.NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made not in file.read_text()
    file.chmod(0o644)
    keys.add(tmp_path, "other")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b'{"keys": 1}', b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_file_locks_the_door(tmp_path: Path, content: bytes) -> None:
    key = keys.add(tmp_path, "me")
    door = Door(tmp_path)
    assert door.refusal("/v1/models", bearer(key)) is None
    (tmp_path / keys.NAME).write_bytes(content)
    refusal = door.refusal("/v1/models", bearer(key))
    assert refusal is not None
    assert str(tmp_path / keys.NAME) in refusal.message
    assert door.refusal("/health", []) is None
    with pytest.raises(Refused, match="cannot be read"):
        keys.add(tmp_path, "other")
    assert (tmp_path / keys.NAME).read_bytes() == content


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "-x", "ü", "a" * 65, "a\n"])
def test_names_are_words(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="no name of a key"):
        keys.add(tmp_path, name)
    assert not (tmp_path / keys.NAME).exists()


@pytest.mark.parametrize("key", ["short", "with space " * 3, "ümläute" * 4, "line\nfeed" * 4])
def test_a_key_of_ones_own_has_to_be_one(tmp_path: Path, key: str) -> None:
    with pytest.raises(Refused, match="16 characters"):
        keys.add(tmp_path, "me", key)


def test_what_is_there_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    keys.add(tmp_path, "me")
    with pytest.raises(Refused, match="there is a key 'me'"):
        keys.add(tmp_path, "me")
    with pytest.raises(Refused, match="there is no key 'you'; there is me"):
        keys.remove(tmp_path, "you")


def test_keys_added_at_once_are_all_there(tmp_path: Path) -> None:
    adding = [threading.Thread(target=keys.add, args=(tmp_path, f"k{n}")) for n in range(8)]
    for each in adding:
        each.start()
    for each in adding:
        each.join()
    assert sorted(each.name for each in keys.read(tmp_path).keys) == [f"k{n}" for n in range(8)]


@given(st.binary(max_size=80))
def test_no_header_breaks_the_door(tmp_path_factory: pytest.TempPathFactory, value: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "door"
    if not (folder / keys.NAME).exists():
        keys.add(folder, "me")
    for name in (b"authorization", b"x-api-key"):
        for given_value in (value, b"Bearer " + value):
            assert Door(folder).refusal("/v1/models", [(name, given_value)]) is not None
