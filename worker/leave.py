"""How a worker leaves: which exit code tells the parent about which failure, and the end of the process."""

import contextlib
import os
import sys
from typing import NoReturn

from shared.control import ExitCode
from shared.errors import ErrorCode, Failure


def exit_code(failure: Failure) -> ExitCode:
    """The code a worker leaves with after `failure`."""
    match failure.code:
        case ErrorCode.BAD_CHECKPOINT | ErrorCode.UNSUPPORTED:
            return ExitCode.CHECKPOINT
        case ErrorCode.CANNOT_FIT:
            return ExitCode.CANNOT_FIT
        case ErrorCode.WIRE_MISMATCH:
            return ExitCode.WIRE
        case ErrorCode.ENGINE_FAULT:
            return ExitCode.ENGINE
        case _:
            return ExitCode.BUG


def leave(code: int) -> NoReturn:
    """End the process now. Native threads may be running: the interpreter's own way out would wait for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
