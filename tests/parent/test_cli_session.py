"""The server that a chat starts for itself: it leaves with the chat, however that one ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from parent.commands.running import Running, find_running
from tests.parent.models import write_model
from tests.parent.terminals import Terminal
from tests.process.harness import DEADLINE_S, is_running, until

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def chatting(data: Path, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", Running]]:
    """A chat that waits for its question, and its own server; both are gone afterwards."""
    chat = subprocess.Popen(
        [sys.executable, "-m", "parent", "chat", *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    server = None
    try:
        server = until(lambda: _with_address(data), "a server of the chat")
        yield chat, server
    finally:
        chat.kill()
        chat.communicate()
        if server is not None and is_running(server.pid):
            os.kill(server.pid, signal.SIGKILL)


def _with_address(data: Path) -> Running | None:
    found = find_running(data)
    return found if found and found.url else None


@pytest.fixture
def data() -> Path:
    """The data folder that every command of the test sees."""
    return Path(os.environ["MLXD_DATA_DIR"])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_the_server_of_a_chat_leaves_with_it(data: Path, number: signal.Signals) -> None:
    write_model(data / "models" / "tiny")
    with closing(Terminal("chat")) as terminal:
        terminal.until(r"/exit ends\.[\s\S]*> ")  # it talks with the server
        server = find_running(data)
        assert server is not None
        try:
            terminal.child.send_signal(number)
            terminal.child.wait(timeout=DEADLINE_S)
            until(lambda: not is_running(server.pid) or None, f"the server to leave after {number.name}")
        finally:
            if is_running(server.pid):
                os.kill(server.pid, signal.SIGKILL)
    assert not (data / "mlxd.lock").exists(), "it did not leave in order"


def test_a_chat_that_is_killed_while_its_server_starts_leaves_none(data: Path) -> None:
    write_model(data / "models" / "tiny")
    with chatting(data) as (chat, server):
        chat.kill()
        until(lambda: not is_running(server.pid) or None, "the server to leave")


def test_a_chat_with_a_folder_asks_for_the_model_by_the_name_its_server_gives_it(
    data: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "mine")
    with chatting(data, str(folder)) as (chat, _):
        _, err = chat.communicate(b"hello", timeout=DEADLINE_S)
    # These weights cannot be loaded, and that is what is said: the name was found.
    assert b"there is no model" not in err
    assert b"mine" in err


def test_a_server_leaves_with_its_pipe(data: Path) -> None:
    write_model(data / "models" / "tiny")
    life, ours = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "parent", "serve", "--port", "0", "--no-open", "--leave-with-fd", str(life)],
        cwd=ROOT,
        pass_fds=(life,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(life)
    try:
        until(lambda: _with_address(data), "a server")
        os.close(ours)
        assert server.wait(timeout=DEADLINE_S) == 0
    finally:
        server.kill()
        server.wait()


def test_the_settings_file_of_a_chat_is_that_of_its_server(data: Path, tmp_path: Path) -> None:
    write_model(data / "models" / "tiny")
    (tmp_path / "my.toml").write_text("model = 'tiny'\nmax_rows = 3\n")
    with chatting(data, "--config", str(tmp_path / "my.toml")) as (_, server):
        words = Path(f"/proc/{server.pid}/cmdline")
        if words.exists():
            assert str(tmp_path / "my.toml") in words.read_text().split("\0")


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_a_first_download_off_a_terminal_is_told(data: Path, verb: str) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "parent", verb],
        cwd=ROOT,
        input=b"hello",
        capture_output=True,
        env={**os.environ, **nowhere, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert b"fetching the starter, SmolLM2-135M-Instruct (92.9 MB)" in done.stderr
