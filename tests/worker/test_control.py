"""The worker's end of the control channel: what ends it, whatever else does not."""

import os
import subprocess
import sys
from pathlib import Path

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
