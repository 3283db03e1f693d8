"""What a job tells, numbered, and kept until the parent has written it down: in memory for a new parent who asks for it
again, and in a file for one who finds this process dead.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shared import ndjson
from shared.control import Fatal, FromWorker, JobUpdate
from shared.errors import Failure
from shared.jobs import JobEvent, JobStage

SPOOL_BYTES = 1 << 18  # of a file in which nothing is left that was not heard, before it is emptied


class Outbox:
    """`tell` and `fail` come from the job's thread, `heard` and `tell_again` from that of the control channel.

    Progress within a stage is not numbered: only the newest matters. Without a `spool` nobody will say `Heard`, and
    nothing is kept.
    """

    def __init__(self, send: Callable[[FromWorker], None], spool: Path | None = None) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._unheard: deque[JobUpdate] = deque()
        self._seq = 0
        self._stage: JobStage | None = None
        self._torn = False  # the last line of the file may be half there
        self._file = -1
        if spool is not None:
            self._file = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def tell(self, event: JobEvent) -> None:
        """Send it, and remember it where it matters."""
        with self._lock:
            update = JobUpdate(event)
            if self._file >= 0 and self._is_news(event):
                self._seq += 1
                update = JobUpdate(event, self._seq)
                self._unheard.append(update)
                self._write(update)
            if isinstance(event, JobStage):
                self._stage = event
            self._send(update)

    def fail(self, failure: Failure) -> None:
        """The last words."""
        with self._lock:
            self._write(Fatal(failure))
            self._send(Fatal(failure))

    def heard(self, seq: int) -> None:
        """Everything up to `seq` is written down."""
        with self._lock:
            while self._unheard and self._unheard[0].seq <= seq:
                self._unheard.popleft()
            if self._file >= 0 and not self._unheard and os.fstat(self._file).st_size > SPOOL_BYTES:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)

    def tell_again(self, heard: int) -> None:
        """A new parent, who knows everything up to `heard`."""
        self.heard(heard)
        with self._lock:
            for update in self._unheard:
                self._send(update)
            if self._stage is not None:
                self._send(JobUpdate(self._stage))

    def _is_news(self, event: JobEvent) -> bool:
        if not isinstance(event, JobStage):
            return True
        return self._stage is None or self._stage.stage != event.stage

    def _write(self, message: FromWorker) -> None:
        """A full disk is no reason to stop: what is in memory still reaches a parent."""
        if self._file < 0:
            return
        data = (b"\n" if self._torn else b"") + ndjson.encode(message)
        try:
            self._torn = os.write(self._file, data) < len(data)
        except OSError:
            self._torn = True
