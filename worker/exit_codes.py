"""Which exit code tells the parent about which failure."""

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
