"""`--leave-with-fd`: a server that somebody started for himself ends when that somebody is gone."""

import os
import signal
import threading


def leave_with(fd: int) -> None:
    """Send ourselves SIGTERM, which drains, once the pipe `fd` reaches its end. Until the server has handlers of
    its own the signal unwinds what runs (a download) as Ctrl-C does.
    """
    os.set_inheritable(fd, False)  # a worker must not keep it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_wait, args=(fd,), name="leave-with", daemon=True).start()


def _wait(fd: int) -> None:
    try:
        while os.read(fd, 64):
            pass
    except OSError:  # not a pipe we may read: nobody would ever tell us, so do not stay
        pass
    os.kill(os.getpid(), signal.SIGTERM)
