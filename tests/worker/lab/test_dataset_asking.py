"""How a data set's job asks a server: what is tried again, after what wait, and what is given up."""

import asyncio
from collections.abc import Sequence

import httpx2
import pytest

from shared.errors import ErrorCode, Refused
from worker.lab.dataset.asking import FAULT_TRIES, TRIES, Server, wait_of
from worker.lab.dataset.form import Answer, Dropped

GOOD = {"choices": [{"message": {"content": "yes", "reasoning_content": None}, "finish_reason": "stop"}]}
Step = tuple[int, dict[str, str]] | httpx2.TransportError


def ask(steps: Sequence[Step], body: object = GOOD) -> tuple[Answer, list[float]]:
    """The answer, and what was waited for. After the steps there is a good answer."""
    waits: list[float] = []
    left = list(steps)

    def handle(request: httpx2.Request) -> httpx2.Response:
        if not left:
            return httpx2.Response(200, json=body)
        step = left.pop(0)
        if isinstance(step, httpx2.TransportError):
            raise step
        return httpx2.Response(step[0], headers=step[1], json={"error": {"message": "not now"}})

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    async def work() -> Answer:
        transport = httpx2.MockTransport(handle)
        server = Server("http://here/", "m", temperature=0, max_tokens=1, pause=pause, transport=transport)
        try:
            return await server.ask([{"role": "user", "content": "a"}], seed=1)
        finally:
            await server.close()

    return asyncio.run(work()), waits


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        ([], []),
        ([(429, {"retry-after": "3"})], [3.0]),
        ([(503, {}), (503, {}), (502, {})], [0.5, 1.0, 2.0]),
        ([(503, {"retry-after": "9999"})], [30.0]),
        ([(503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})], [0.5]),
        ([httpx2.ConnectError("refused"), httpx2.ReadError("cut")], [0.5, 1.0]),
        ([(500, {}), (500, {})], [0.5, 1.0]),
    ],
)
def test_a_dataset_request_is_tried_again_as_the_server_says(steps: list[Step], waits: list[float]) -> None:
    answer, waited = ask(steps)
    assert answer == Answer("yes")
    assert waited == waits


def test_a_dataset_request_to_a_server_that_stays_away_may_be_made_later() -> None:
    with pytest.raises(Refused, match=f"answers 503: not now; asked {TRIES} times") as refused:
        ask([(503, {"retry-after": "7"})] * TRIES)
    assert refused.value.failure.code is ErrorCode.ENGINE_UNAVAILABLE
    assert refused.value.failure.retry_after_s == 30.0  # by then the wait is longer than what was asked for


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_dataset_request_that_is_refused_costs_its_unit_alone(status: int) -> None:
    with pytest.raises(Dropped, match=f"answers {status}: not now"):
        ask([(status, {})])


def test_a_dataset_request_that_the_server_fails_with_again_and_again_is_dropped() -> None:
    with pytest.raises(Dropped, match="answers 500"):
        ask([(500, {})] * (FAULT_TRIES + 1))


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, ErrorCode.MODEL_NOT_FOUND), (401, ErrorCode.FORBIDDEN), (403, ErrorCode.FORBIDDEN)],
)
def test_a_dataset_job_ends_where_every_request_would_be_refused(status: int, code: ErrorCode) -> None:
    with pytest.raises(Refused) as refused:
        ask([(status, {})])
    assert refused.value.failure.code is code


@pytest.mark.parametrize("body", [{}, {"choices": []}, [], {"choices": [{"message": 3}]}, "x"])
def test_a_dataset_answer_that_is_no_completion_is_dropped(body: object) -> None:
    with pytest.raises(Dropped, match="is no chat completion"):
        ask([], body)


def test_a_dataset_answer_brings_thinking_calls_and_its_end() -> None:
    message = {
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    answer, _ = ask([], {"choices": [{"message": message, "finish_reason": "length"}]})
    assert answer == Answer("", "hm", (("f", "{}"),), is_whole=False)


@pytest.mark.parametrize(("header", "seconds"), [("", 0), ("5", 5), ("0.5", 0.5), ("-1", 0), ("soon", 0)])
def test_dataset_waits_are_read_from_the_header(header: str, seconds: float) -> None:
    assert wait_of(header) == seconds
