"""What of a job worker's output is shown: no log lines of ours, no signed address."""

import logging

import pytest

from parent.jobs.quoting import last_words, shown, without_queries
from shared.errors import ErrorCode, Failure
from shared.logs import JsonLines

SIGNED = "https://cdn.example/a/b.safetensors?X-Amz-Signature=s3cret&x=1"


def log_line(text: str) -> str:
    return JsonLines().format(logging.LogRecord("httpx2", logging.INFO, "", 0, text, (), None))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (SIGNED, "https://cdn.example/a/b.safetensors"),
        (f'GET "{SIGNED}" failed', 'GET "https://cdn.example/a/b.safetensors" failed'),
        (
            f"<{SIGNED}>, {SIGNED}",
            "<https://cdn.example/a/b.safetensors>, https://cdn.example/a/b.safetensors",
        ),
        ("HTTP://h:80?s=3cret is gone", "HTTP://h:80 is gone"),
        ("https://h/a#s3cret", "https://h/a"),
        ("is that so? http://h/a is", "is that so? http://h/a is"),
        ("", ""),
    ],
)
def test_an_address_ends_with_its_path(text: str, kept: str) -> None:
    assert without_queries(text) == kept
    assert shown(Failure(ErrorCode.HUB, text, retry_after_s=2.0)) == Failure(
        ErrorCode.HUB, kept, retry_after_s=2.0
    )


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ([], ""),
        ([log_line(SIGNED)], ""),
        ([log_line(SIGNED)[:40]], ""),
        (["Abort trap", log_line("x"), "", " "], "Abort trap"),
        ([log_line("x"), f"error: {SIGNED}"], "error: https://cdn.example/a/b.safetensors"),
        (['{"not": "ours"}'], '{"not": "ours"}'),
    ],
)
def test_the_last_words_are_the_last_plain_line(lines: list[str], last: str) -> None:
    assert last_words(lines) == last
