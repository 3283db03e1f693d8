"""Code of strangers, run where it can do no harm: no network, no process of its own, no file but in a scratch folder.

Linux: Landlock for files, a seccomp filter for the rest (`confined.py`). macOS: sandbox-exec. Both with limits of CPU
time, memory, file size and open files, a time-out, and an end of the whole process group. `require` proves on this very
machine that the walls hold, before anything is run.
"""

import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shared.errors import ErrorCode, refuse

TIMEOUT_S = 10.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
DISK_BYTES = 64 << 20
ALARM_AFTER_S = 5
"""Should nobody be left to end it, it ends so long after its time."""
_LOOK_S = 0.02
_ERRORS = 300  # characters
_CONFINED = Path(__file__).with_name("confined.py")
_SANDBOX_EXEC = "/usr/bin/sandbox-exec"

_PROBE = """\
import os, socket
def held(what, attempt):
    try:
        attempt()
    except (OSError, AttributeError):
        return
    raise SystemExit(f"{what} is not held back")
held("the network", lambda: socket.create_connection(("127.0.0.1", %(port)d), 5).close())
held("a process of its own", os.fork)
held("reading files", lambda: open(%(secret)r).close())
held("writing files", lambda: open(%(beside)r, "w").close())
held("removing files", lambda: os.unlink(%(secret)r))
with open("scratch", "w") as file:
    file.write("x")
"""


class Outcome(NamedTuple):
    """`problem`: why it did not run to its end, "" = it did. `output`: what it printed, or the beginning of it."""

    problem: str
    output: str = ""


def missing(platform: str = sys.platform) -> str:
    """What this platform lacks; "" = nothing that is known."""
    if platform.startswith("linux"):
        return _confined("--missing").stdout.strip()
    if platform == "darwin":
        return "" if os.access(_SANDBOX_EXEC, os.X_OK) else f"{_SANDBOX_EXEC} is missing"
    return f"{platform} has no way that is known"


@functools.cache
def require(lacks: Callable[[], str] = missing) -> None:
    """Raises `Refused` (unsupported) where this platform cannot hold code back; what it can is tried out once."""
    if (reason := lacks()) or (reason := _leak()):
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"generated code is run only in a sandbox, and there is none here: {reason}; use another template",
        )


def _leak() -> str:
    """Which wall does not hold; "" = all do."""
    folder = Path(tempfile.mkdtemp(prefix="mlxd-probe-"))
    try:
        secret = folder / "secret"
        secret.write_text("x")
        with socket.create_server(("127.0.0.1", 0)) as listener:  # somebody whom it could reach
            port = listener.getsockname()[1]
            names = {"secret": str(secret), "beside": str(folder / "beside"), "port": port}
            problem = run(_PROBE % names).problem
        return problem or ("" if secret.exists() else "a file was removed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(code: str, *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run a Python program to its end. Call `require` once before. Nothing that it does is raised."""
    scratch = Path(tempfile.mkdtemp(prefix="mlxd-sandbox-")).resolve()
    try:
        inside, output, errors = scratch / "in", scratch / "out.txt", scratch / "err.txt"
        inside.mkdir()
        done = secrets.token_hex(16)  # said last: a program that leaves early does not come so far
        (inside / "program.py").write_text(f"{code}\nprint({done!r}, flush=True)\n", encoding="utf-8")
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                _command(inside, timeout_s),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=inside,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(inside),
                    "TMPDIR": str(inside),
                    "LC_ALL": "C.UTF-8",
                },
                start_new_session=True,
            )
            problem = _watch(process, inside, timeout_s)
        said = output.read_bytes()[: FILE_BYTES + 1].decode("utf-8", "replace")
        whole = said.rstrip("\n").endswith(done)
        if not problem and not whole:
            problem = _reason(process.returncode, errors.read_bytes())
        return Outcome(problem, said.rstrip("\n").removesuffix(done) if whole else said)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(process: "subprocess.Popen[bytes]", folder: Path, timeout_s: float) -> str:
    """Wait for its end, or bring it about. -> why it was ended."""
    until, problem = time.monotonic() + timeout_s, ""
    try:
        while not problem:
            try:
                process.wait(_LOOK_S)
                return ""
            except subprocess.TimeoutExpired:
                if time.monotonic() > until:
                    problem = f"timed out after {timeout_s:g} s"
                elif _size(folder) > DISK_BYTES:
                    problem = f"wrote more than {DISK_BYTES >> 20} MiB"
        return problem
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _reason(code: int, errors: bytes) -> str:
    """Of a program that ended by itself, and not at its end."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        return "used more CPU time than allowed" if name == "SIGXCPU" else f"was ended by {name}"
    text = errors.decode("utf-8", "replace").strip()
    last = text.splitlines()[-1].strip() if text else ""
    return (last or f"left early with exit code {code}")[:_ERRORS]


# ---------------------------------------------------------------- walls


def _command(folder: Path, timeout_s: float) -> list[str]:
    limits = {
        "parent": os.getpid(),
        "cpu_s": int(timeout_s) + 1,
        "alarm_s": int(timeout_s) + ALARM_AFTER_S,
        "memory": MEMORY_BYTES,
        "file": FILE_BYTES,
    }
    inner = [*_python(), str(_CONFINED), json.dumps(limits), str(folder), *_python(), "program.py"]
    if sys.platform == "darwin":
        return [_SANDBOX_EXEC, "-p", profile(folder), *inner]
    return inner


def _python() -> list[str]:
    """The interpreter beneath a virtual environment: its standard library, and nothing that is installed."""
    found = getattr(sys, "_base_executable", None) or sys.executable
    return [os.path.realpath(found), "-I", "-S", "-B", "-X", "utf8"]


def _confined(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*_python(), str(_CONFINED), *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def profile(folder: Path) -> str:
    """sandbox-exec's words for: read the interpreter, write here, nothing else."""
    read = [
        sys.base_prefix,
        "/usr/lib",
        "/usr/share",
        "/System",
        "/Library/Frameworks",
        str(_CONFINED),
        str(folder),
    ]
    paths = " ".join(f"(subpath {json.dumps(os.path.realpath(path))})" for path in read)
    return "\n".join(
        [
            "(version 1)",
            "(deny default)",
            f'(allow file-read* {paths} (literal "/") (literal "/dev/null") (literal "/dev/urandom"))',
            "(allow file-read-metadata)",
            f'(allow file-write* (subpath {json.dumps(os.path.realpath(folder))}) (literal "/dev/null"))',
            f"(allow process-exec (subpath {json.dumps(os.path.realpath(sys.base_prefix))}))",
            "(allow sysctl-read)",
            "(deny network*)",
            "(deny process-fork)",
        ]
    )
