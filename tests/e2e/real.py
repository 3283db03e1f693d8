"""`mlxd serve` on a real model directory, as a user starts it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.process.harness import DEADLINE_S, ROOT, Served, is_running, until


@contextlib.contextmanager
def serving(model_dir: Path, tmp_path: Path, *flags: str) -> Iterator[Served]:
    """A running server; ends with no process left, its workers included."""
    environment = {**os.environ, "MLXD_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-P",
        "-m",
        "parent",
        "serve",
        str(model_dir),
        "--no-open",
        "--port",
        "0",
        *flags,
    ]
    with open(tmp_path / "stderr", "a") as stderr:
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if " at http" not in line:
        process.stdout.close()
        process.wait(DEADLINE_S)
        raise AssertionError((tmp_path / "stderr").read_text())
    server = Served(process, line.split()[-1], tmp_path / "data", model_dir)
    pid = None
    try:
        yield server
        if process.poll() is None:
            pid = server.engine()["pid"]
    finally:
        server.http.close()
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE_S)
        process.stdout.close()
    if pid is not None:
        until(lambda: not is_running(pid), "the worker has left")
