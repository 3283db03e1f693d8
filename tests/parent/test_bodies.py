"""Bodies of our own routes: whatever comes is read or refused in one line, and never a bug."""

import asyncio

import msgspec
import pytest

from parent.bodies import read_json
from parent.routes.front import _is_ollama
from shared.errors import ErrorCode, Refused


class Body(msgspec.Struct):
    model: str = ""


def read(data: bytes, shape: str = "") -> Body:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": data, "more_body": False}

    return asyncio.run(read_json(receive, Body, 1 << 20, silence_s=5.0, shape=shape))


@pytest.mark.parametrize("data", [b"", b" \n", b"{}"])
def test_no_body_is_an_empty_object(data: bytes) -> None:
    assert read(data) == Body()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"model": 3}', "Expected `str`, got `int`"),
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b'{"model": "\xff"}', "UTF-8|utf-8"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
    ],
)
def test_what_is_no_such_body_is_refused_in_one_line(data: bytes, said: str) -> None:
    for shape in ("", '{"model": NAME}'):
        with pytest.raises(Refused, match=said) as refused:
            read(data, shape)
        assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
        assert "\n" not in str(refused.value)
        assert shape in str(refused.value)


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("/api/chat", True),
        ("/api/no-such", True),
        ("/api/jobs", False),
        ("/api/jobs/job_1", False),
        ("/api/finetune/merge", False),
        ("/apis", False),
        ("/v1/models", False),
    ],
)
def test_refusals_below_api_come_in_ollamas_form_where_the_path_is_of_ollama(path: str, theirs: bool) -> None:
    assert _is_ollama({"path": path}) is theirs
