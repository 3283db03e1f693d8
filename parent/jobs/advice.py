"""What may be done about a job that failed, in a few words. Pure."""

from parent.jobs import kinds
from shared.errors import ErrorCode, Failure


def advice(kind: str, failure: Failure) -> str:
    """A line to stand below the failure; "" where its message says all."""
    match failure.code:
        case ErrorCode.CANNOT_FIT:
            ways = kinds.kind_of(kind).saves_memory
            smaller = f"try {ways}, or " if ways else ""
            return f"{smaller}unload models that are not needed"
        case ErrorCode.DISK_FULL:
            return "free some room on the disk, then retry"
        case ErrorCode.ENGINE_UNAVAILABLE:
            known = kinds.kind_of(kind)
            return "retry goes on from the last checkpoint" if known.resumable else "retry begins it again"
        case ErrorCode.INTERNAL:
            return "the log of the job may say more; retry, or report it"
    return ""
