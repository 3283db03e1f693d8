"""The ASGI helpers: bounded bodies, and work that ends when the client leaves."""

import asyncio
from typing import Any

import pytest

from shared import asgi
from shared.errors import ErrorCode, Refused


def receiver(*messages: dict[str, Any]) -> asgi.Receive:
    """Gives the messages, then waits for ever, as a server does."""
    left = list(messages)

    async def receive() -> asgi.Message:
        if left:
            return left.pop(0)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    return receive


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def test_a_body_is_read_whole_up_to_its_limit() -> None:
    receive = receiver(part(b"ab", True), part(b"", True), part(b"c", False))
    assert asyncio.run(asgi.read_body(receive, 3)) == b"abc"


@pytest.mark.parametrize(
    ("messages", "declared"),
    [([part(b"abcd", False)], None), ([part(b"ab", True), part(b"cd", True)], None), ([], 4)],
)
def test_a_body_over_the_limit_is_refused_before_it_is_all_there(
    messages: list[dict[str, Any]], declared: int | None
) -> None:
    with pytest.raises(Refused) as refused:
        asyncio.run(asgi.read_body(receiver(*messages), 3, declared=declared))
    assert refused.value.failure.code is ErrorCode.TOO_LARGE


def test_a_client_that_leaves_in_mid_body_is_told_apart() -> None:
    with pytest.raises(asgi.ClientGone):
        asyncio.run(asgi.read_body(receiver(part(b"ab", True), GONE), 10))


def test_work_that_ends_by_itself_is_awaited_and_its_errors_come_through() -> None:
    async def fine() -> None:
        await asyncio.sleep(0)

    async def broken() -> None:
        raise ValueError("from the work")

    assert asyncio.run(asgi.run_until_gone(receiver(), fine)) is True
    with pytest.raises(ValueError, match="from the work"):
        asyncio.run(asgi.run_until_gone(receiver(), broken))


def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    assert asyncio.run(asgi.run_until_gone(receiver(GONE), work)) is False
    assert cleaned == ["yes"]


def test_being_cancelled_cancels_the_work() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    async def main() -> None:
        task = asyncio.ensure_future(asgi.run_until_gone(receiver(), work))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cleaned == ["yes"]


def test_a_response_has_a_length_and_a_type() -> None:
    sent: list[asgi.Message] = []

    async def send(message: asgi.Message) -> None:
        sent.append(message)

    asyncio.run(asgi.respond(send, 201, b"{}"))
    assert dict(sent[0]["headers"]) == {b"content-type": b"application/json", b"content-length": b"2"}
    assert (sent[0]["status"], sent[1]["body"]) == (201, b"{}")
