"""Between two steps: held until it may go on, and stopped whether held or not. What an exception of a job means."""

import errno
import threading

import pytest

from shared.errors import ErrorCode
from worker.jobs.failing import failure_of
from worker.jobs.gate import Gate
from worker.jobs.peak import peak_bytes


def asked(gate: Gate) -> tuple[threading.Thread, list[bool]]:
    """A job that asks whether it should stop."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(gate.should_stop()))
    thread.start()
    return thread, answers


@pytest.mark.parametrize(("word", "answer"), [("go_on", False), ("stop", True)])
def test_a_held_job_waits_for_a_word(word: str, answer: bool) -> None:
    gate = Gate()
    assert not gate.should_stop()
    gate.hold()
    thread, answers = asked(gate)
    thread.join(0.05)
    assert answers == []
    getattr(gate, word)()
    thread.join(10)
    assert answers == [answer]


def test_a_stopped_job_cannot_be_held() -> None:
    gate = Gate()
    gate.stop()
    gate.hold()
    assert gate.should_stop()


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MemoryError(), ErrorCode.CANNOT_FIT, "out of memory"),
        (
            RuntimeError("[malloc] Unable to allocate 7 bytes."),
            ErrorCode.CANNOT_FIT,
            "out of memory ([malloc]",
        ),
        (
            RuntimeError("[metal::malloc] Attempting to allocate 9 bytes"),
            ErrorCode.CANNOT_FIT,
            "out of memory",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), ErrorCode.DISK_FULL, "the disk is full"),
        (OSError(errno.EIO, "broken"), ErrorCode.INTERNAL, "the job failed: OSError"),
        (RuntimeError("shapes differ"), ErrorCode.INTERNAL, "shapes differ"),
    ],
)
def test_an_exception_nobody_has_foreseen_gets_its_code(error: Exception, code: ErrorCode, says: str) -> None:
    failure = failure_of(error)
    assert failure.code is code
    assert says in failure.message


def test_a_process_knows_what_it_has_held() -> None:
    assert peak_bytes() > 1 << 20
