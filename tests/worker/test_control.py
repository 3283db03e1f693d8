"""The worker's end of the control channel: what ends it, whatever else does not."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from worker.__main__ import _thread_failed

ROOT = Path(__file__).resolve().parents[2]

STUCK = """
import ctypes, time
from worker.control import guard
guard(stuck_s=1.0, every_s=0.2)
time.sleep(2.0)  # an interpreter that runs is left alone
print("alive", flush=True)
ctypes.PyDLL(None).sleep(600)  # native code that does not give the interpreter's lock back
"""


def test_an_interpreter_that_runs_no_python_any_more_ends_itself_stacks_first():
    child = subprocess.run(
        [sys.executable, "-c", STUCK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.stdout == "alive\n"
    assert child.returncode == 1
    assert "Timeout" in child.stderr
    assert 'File "<string>", line 7' in child.stderr


def test_a_message_of_an_unknown_type_is_passed_over_with_a_line_in_the_log():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "worker", "--control-fd", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.sendall(b'{"type":"dance"}\n{"type":"shutdown"}\n')
        _, said = child.communicate(timeout=60)
    assert child.returncode == 0
    [line] = [json.loads(line) for line in said.splitlines()]
    assert (line["level"], line["event"]) == ("warning", "control.unknown_message")
    assert "dance" in line["error"]


def test_a_thread_that_fails_is_in_the_log(monkeypatch, caplog):
    def fail() -> None:
        raise ValueError("as told")

    monkeypatch.setattr(threading, "excepthook", _thread_failed)
    thread = threading.Thread(target=fail, name="heartbeat")
    thread.start()
    thread.join()
    [record] = caplog.records
    assert (record.getMessage(), record.__dict__["fields"]) == (
        "worker.thread_failed",
        {"thread": "heartbeat"},
    )
    assert "ValueError: as told" in caplog.text
