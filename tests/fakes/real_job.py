"""A real job in a fake worker: for tests of what only that does, such as living on without its parent."""

import os

from shared.control import LaunchJob
from shared.jobs import CountJob


def work(order: LaunchJob, control_fd: int, adopt_fd: int) -> None:
    """Where the job is a count: do it in this process, whose own ends of the channels are not touched any more, and
    leave.
    """
    if not isinstance(order.spec, CountJob):
        return
    from worker.__main__ import _work  # here: no other fake pays for it
    from worker.control import Control

    os._exit(_work(order, Control(os.dup(control_fd), adopt_fd)))
