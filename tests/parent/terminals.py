"""A command at a pseudo-terminal, for tests of what people see and type."""

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


class Terminal:
    """`mlxd WORDS` at a pseudo-terminal: write to it, and wait for what it shows."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "parent", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str) -> None:
        """Read until the pattern was shown; what stood before it is forgotten."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.seen):
            assert time.monotonic() < give_up_at, f"waited for {pattern!r}, saw {self.seen!r}"
            if select.select([self.ours], [], [], 1.0)[0]:
                self.seen += os.read(self.ours, 4096).decode(errors="replace")
        self.seen = re.split(pattern, self.seen, maxsplit=1)[-1]

    def write(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.ours)


def _take_terminal() -> None:
    """In the child: the pseudo-terminal becomes its controlling one, so that ^C reaches it as a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
