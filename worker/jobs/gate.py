"""Between two steps of a job: the place where it waits, or learns that it is to stop."""

import threading


class Gate:
    """`hold`, `go_on` and `stop` come from the thread of the control channel, `should_stop` from the job."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        """The next step has to wait."""
        if not self._stopped.is_set():
            self._open.clear()

    def go_on(self) -> None:
        """It may be taken."""
        self._open.set()

    def stop(self) -> None:
        """There shall be no next step."""
        self._stopped.set()
        self._open.set()

    def should_stop(self) -> bool:
        """Waits while the job is held; then whether it is no longer wanted."""
        self._open.wait()
        return self._stopped.is_set()
