"""The server's own API, asked by a job as by any client: many requests at once, tried again as the server says."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import msgspec

from shared.errors import ErrorCode, Failure, Refused, refuse
from worker.lab import local_key
from worker.lab.dataset.form import Answer, Dropped, Message

TRIES = 8
"""Of one request that finds the server away or full."""
FAULT_TRIES = 2
"""Of one that the server fails with: after that it is that request's fault."""
FIRST_S, LONGEST_S = 0.5, 30.0
READ_S = 900.0
"""A long answer of a slow model, and the wait before it."""
_AWAY = {408, 425, 429, 502, 503, 504}


class Server:
    """A server that answers chats. `pause(seconds)` waits; it is what ends a job that is stopped."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float,
        max_tokens: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._fixed: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if model not in ("", "local"):
            self._fixed["model"] = model
        self._pause = pause
        self._http = httpx2.AsyncClient(
            trust_env=False,
            headers=local_key.headers(),
            transport=transport,
            timeout=httpx2.Timeout(READ_S, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, messages: list[Message], *, seed: int, tools: list[Any] | None = None) -> Answer:
        """One answer. Raises `Dropped` where the server refuses this request, `Refused` where it takes none."""
        body = {**self._fixed, "messages": messages, "seed": seed}
        if tools:
            body["tools"] = tools
        return answer_of(await self._post("/v1/chat/completions", msgspec.json.encode(body)))

    async def _post(self, path: str, body: bytes) -> bytes:
        away = faults = 0
        while True:
            patience = 0.0
            try:
                answer = await self._http.post(
                    f"{self.url}{path}", content=body, headers={"content-type": "application/json"}
                )
            except httpx2.InvalidURL as error:
                raise refuse(ErrorCode.INVALID_REQUEST, f"{self.url}: {error}", param="url") from None
            except httpx2.TransportError as error:
                said = f"{self.url} does not answer: {' '.join(str(error).split()) or type(error).__name__}"
            else:
                if answer.is_success:
                    return answer.content
                said = f"{self.url} answers {answer.status_code}: {words_of(answer.content)}"
                if answer.status_code not in _AWAY:
                    if answer.status_code < 500 or faults >= FAULT_TRIES:
                        raise _judged(answer.status_code, said)
                    faults += 1
                patience = wait_of(answer.headers.get("retry-after", ""))
            away += 1
            delay = min(max(patience, FIRST_S * 2.0 ** (away - 1)), LONGEST_S)
            if away >= TRIES:
                raise Refused(
                    Failure(ErrorCode.ENGINE_UNAVAILABLE, f"{said}; asked {away} times", None, delay)
                )
            await self._pause(delay)


def _judged(status: int, said: str) -> Exception:
    if status == 404:
        return refuse(ErrorCode.MODEL_NOT_FOUND, said, param="model")
    if status in (401, 403):
        return refuse(ErrorCode.FORBIDDEN, said, param="url")
    return Dropped(said)


def words_of(content: bytes) -> str:
    """The message of a refusal."""
    try:
        found = msgspec.json.decode(content)
        return str(found["error"]["message"])[:500]
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        return " ".join(content[:200].decode("utf-8", "replace").split()) or "nothing readable"


def wait_of(header: str) -> float:
    """Seconds of a Retry-After; 0 where there is none that can be read."""
    return float(header) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", header.strip()) else 0.0


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    function: _Function


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Completion).decode


def answer_of(content: bytes) -> Answer:
    """A completion as OpenAI has it. Raises `Dropped` for anything else."""
    try:
        [first, *_] = _decode(content).choices
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Dropped(f"the answer is no chat completion ({error})") from None
    said = first.message
    return Answer(
        said.content or "",
        said.reasoning_content or said.reasoning or "",
        tuple((call.function.name, call.function.arguments) for call in said.tool_calls or ()),
        first.finish_reason != "length",
    )
