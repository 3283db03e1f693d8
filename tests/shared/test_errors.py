"""Failures: what each code means for trying again, and how one travels."""

import msgspec
import pytest

from shared.errors import PERMANENT, RETRYABLE, ErrorCode, Failure, refuse


def test_no_code_is_both_permanent_and_worth_a_retry() -> None:
    assert not PERMANENT & RETRYABLE


@pytest.mark.parametrize("code", ErrorCode)
def test_a_failure_survives_the_wire_and_knows_its_kind(code: ErrorCode) -> None:
    failure = Failure(code, "what is wrong", "field", 2.5)
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    assert failure.is_retryable is (code in RETRYABLE)
    assert failure.is_permanent is (code in PERMANENT)


def test_a_refusal_reads_as_its_message() -> None:
    refused = refuse(ErrorCode.TOO_LARGE, "the body is too large", param="body")
    assert str(refused) == "the body is too large"
    assert refused.failure == Failure(ErrorCode.TOO_LARGE, "the body is too large", "body")
