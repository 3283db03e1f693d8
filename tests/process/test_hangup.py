"""SIGHUP: the settings are read again; from a terminal that is gone it means stop."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from tests.process.harness import DEADLINE_S, ROOT, Served, content, left_in, served, until, write_model
from tests.process.test_shutdown import Streaming


@contextlib.contextmanager
def at_a_terminal(tmp_path: Path) -> Iterator[tuple[Served, int]]:
    """A server started at a terminal of its own, and the end of that terminal that can be closed."""
    write_model(tmp_path / "model", {"tokens": 40, "ms_per_token": 20})
    given = json.dumps({"data_dir": str(tmp_path / "data"), "port": 0})
    ours, theirs = pty.openpty()
    with open(tmp_path / "stderr", "a") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.serve_fake", given, str(tmp_path / "model")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        )
    os.close(theirs)
    assert process.stdout is not None
    server = Served(process, process.stdout.readline().strip(), tmp_path / "data", tmp_path / "model")
    try:
        yield server, ours
    finally:
        server.http.close()
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_hangup_without_a_terminal_reads_the_settings_again_and_stops_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        (server.data_dir / "mlxd.toml").write_text("no_such_setting = 1\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "no_such_setting" in server.errors(), "the settings to be read")
        assert server.ask().status_code == 200
        (server.data_dir / "mlxd.toml").unlink()


def test_a_hangup_while_the_terminal_is_there_stops_nothing(tmp_path: Path) -> None:
    with at_a_terminal(tmp_path) as (server, ours):
        server.wait_state("ready")
        (server.data_dir / "mlxd.toml").write_text("no_such_setting = 1\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "no_such_setting" in server.errors(), "the settings to be read")
        assert server.ask(max_tokens=1).status_code == 200
        (server.data_dir / "mlxd.toml").unlink()
        assert server.stop() == 0
        os.close(ours)


def test_a_terminal_that_is_closed_stops_the_server_and_twice_means_no_haste(tmp_path: Path) -> None:
    with at_a_terminal(tmp_path) as (server, ours):
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        os.close(ours)  # the kernel says SIGHUP
        until(lambda: "server.signal" in server.errors(), "the first signal to be seen")
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(DEADLINE_S) == 0
        stream.join()
        assert len(content(stream.received).split()) == 40
        assert left_in(tmp_path / "data") == set()
