"""Keys: once there is one, whoever asks needs one. They lie in `keys.json` of the data folder (0600), as hashes.

The commands of whoever owns that folder have a key of their own in the same file: who can read it has everything else
in the folder as well.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from parent import settings_file
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.files import decode_json, read_regular

NAME = "keys.json"
SHORTEST = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "mlxd-"
_OPEN = frozenset({"/", "/health", "/ready"})
"""What anybody may see: the page without anything in it, and whether the server lives."""


class Key(msgspec.Struct, frozen=True):
    """`created` in seconds since 1970."""

    name: str
    sha256: str
    created: float


class Ring(msgspec.Struct, frozen=True):
    """The content of the file. `local`: the key of this machine's own commands, in the clear."""

    local: str = ""
    keys: list[Key] = []


def read(data_dir: Path) -> Ring:
    """The keys of this folder; none where there is no file. Raises `Refused` where it cannot be read."""
    path = data_dir / NAME
    try:
        found: Ring = decode_json(read_regular(path), Ring)
    except FileNotFoundError:
        return Ring()
    except (OSError, ValueError) as error:
        raise refuse(
            ErrorCode.CONFLICT,
            f"{path} cannot be read: {error}; mend or remove it (without it everybody may ask)",
        ) from None
    return found


def add(data_dir: Path, name: str, key: str = "") -> str:
    """A new key under this name, `key` or one made here. Raises `Refused`."""
    if not _NAME.fullmatch(name):
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{name!r} is no name of a key: letters, digits and . _ - (at most 64)"
        )
    key = key or _PREFIX + secrets.token_urlsafe(32)
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"a key has {SHORTEST} characters or more, of ASCII and without spaces"
        )
    with _changing(data_dir):
        ring = read(data_dir)
        if any(each.name == name for each in ring.keys):
            raise refuse(ErrorCode.CONFLICT, f"there is a key {name!r}; `mlxd keys rm {name}` removes it")
        keys = [*ring.keys, Key(name, _hashed(key), time.time())]
        _write(data_dir, Ring(ring.local or _PREFIX + secrets.token_urlsafe(32), keys))
    return key


def remove(data_dir: Path, name: str) -> int:
    """How many keys are left; after the last one everybody may ask. Raises `Refused`."""
    with _changing(data_dir):
        ring = read(data_dir)
        left = [each for each in ring.keys if each.name != name]
        if len(left) == len(ring.keys):
            names = ", ".join(each.name for each in ring.keys) or "none"
            raise refuse(ErrorCode.NOT_FOUND, f"there is no key {name!r}; there is {names}")
        _write(data_dir, Ring(ring.local, left))
    return len(left)


def local_key(data_dir: Path) -> str:
    """The key of commands on this machine; "" where none is needed, or the file is not ours to read."""
    try:
        ring = read(data_dir)
    except Refused:
        return ""
    return ring.local if ring.keys else ""


class Door:
    """Who may come in. The file is read again when it has changed, so that no key needs a restart."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._seen: tuple[int, ...] | None = None
        self._hashes: frozenset[str] = frozenset()
        self._fault = ""

    def refusal(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Failure | None:
        """Why this request has to stay outside, or None."""
        self._look()
        if not self._hashes and not self._fault:
            return None
        if path in _OPEN or path.startswith("/static/"):
            return None
        if self._fault:
            return Failure(ErrorCode.UNAUTHORIZED, self._fault)
        given = _given(headers)
        if not given:
            return Failure(
                ErrorCode.UNAUTHORIZED,
                "this server wants a key: send `Authorization: Bearer KEY` (`mlxd keys add NAME` makes one)",
            )
        if not any(_hashed(key) in self._hashes for key in given):
            return Failure(ErrorCode.UNAUTHORIZED, "this key is not one of this server's; see `mlxd keys`")
        return None

    def _look(self) -> None:
        try:
            found = os.stat(self._data_dir / NAME)
            seen: tuple[int, ...] = (found.st_mtime_ns, found.st_ino, found.st_size)
        except FileNotFoundError:
            self._seen, self._hashes, self._fault = None, frozenset(), ""
            return
        except OSError:
            seen = (0,)
        if seen == self._seen:
            return
        try:
            ring = read(self._data_dir)
        except Refused as refused:
            self._fault, self._hashes = refused.failure.message, frozenset()
        else:
            local = [_hashed(ring.local)] if ring.keys else []
            self._fault, self._hashes = "", frozenset([*local, *(each.sha256 for each in ring.keys)])
        self._seen = seen


def _given(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The keys of a request: some clients send one here and an empty one there."""
    found = []
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"x-api-key":
            found.append(text)
        elif name == b"authorization" and text[:7].lower() == "bearer ":
            found.append(text[7:].strip())
    return [key for key in found if key]


def _hashed(key: str) -> str:
    """Keys are long and random, or their owner's choice: no salt is needed against tables of them."""
    return hashlib.sha256(key.encode()).hexdigest()


@contextlib.contextmanager
def _changing(data_dir: Path) -> Iterator[None]:
    """One at a time: two commands at once must not lose a key of each other's."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(data_dir, os.O_RDONLY)
    except OSError as error:
        raise refuse(ErrorCode.CONFLICT, f"cannot open {data_dir}: {error.strerror or error}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(data_dir: Path, ring: Ring) -> None:
    text = msgspec.json.format(msgspec.json.encode(ring)).decode()
    settings_file.replace(data_dir / NAME, text + "\n", mode=0o600)
