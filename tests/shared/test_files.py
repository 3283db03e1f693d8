"""Only regular files are read: whatever else stands in their place is named at once and never waited for."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.files import NotRegular, open_regular, read_regular


def fifo(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


IN_THE_PLACE: dict[str, tuple[Callable[[Path], object], str]] = {
    "named pipe": (fifo, "a named pipe, not a file"),
    "dangling link": (dangling, "a link that leads nowhere"),
    "device": (device, "a device, not a file"),
    "socket": (unix_socket, "a socket, not a file"),
    "folder": (Path.mkdir, "a folder, not a file"),
}
"""What may stand where a file should: how it is made, and what is said of it."""


@contextmanager
def let_go(path: Path) -> Iterator[None]:
    """Should somebody wait for a pipe's other end all the same, he is let go after a while: to fail, not to hang."""
    timer = threading.Timer(20, lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK)))
    if path.is_fifo():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("kind", IN_THE_PLACE)
def test_what_is_no_file_is_refused_by_what_it_is(tmp_path: Path, kind: str) -> None:
    make, said = IN_THE_PLACE[kind]
    make(tmp_path / "it")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with let_go(tmp_path / "it"), pytest.raises(NotRegular) as caught:
        read_regular(tmp_path / "it")
    assert (caught.value.strerror, caught.value.filename) == (said, str(tmp_path / "it"))
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


def test_a_file_is_read_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"content")
    (tmp_path / "link").symlink_to("it")
    assert read_regular(tmp_path / "link") == b"content"
    with open_regular(str(tmp_path / "it")) as file:
        assert (file.read(3), file.read()) == (b"con", b"tent")


def test_an_absent_file_is_just_that(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "it")
