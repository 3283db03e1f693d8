"""How fast a served model is: sizes of prompts times numbers of streams, measured over HTTP as a client sees it.

Prompts are token ids, so that they have exactly so many, in an order of their own each, so that nothing is found again
that was kept of another one.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2
import msgspec

from shared.errors import ErrorCode, refuse
from worker.lab import local_key
from worker.lab.dataset.asking import words_of

TEXT = (
    "The harbour keeper counted the waves and wrote each one down, while the lamps along the quay went out one by one. "
    "Nobody had asked him to. A number that nobody needs is still a number, he used to say, and the sea has so many. "
)
WARM_UP = 8  # tokens
_READ_S = 900.0


class Answered(NamedTuple):
    """Of one request: seconds to the first text and to the last, how many tokens came, and how many with the first."""

    first_s: float
    last_s: float
    tokens: int
    first_tokens: int = 1

    @property
    def rate(self) -> float:
        """Tokens a second behind the first text; where most came at once, as held back text does, over all the time."""
        behind = self.tokens - self.first_tokens
        if behind * 2 < self.tokens or self.last_s <= self.first_s:
            return self.tokens / self.last_s if self.last_s else 0.0
        return behind / (self.last_s - self.first_s)


class Point(msgspec.Struct, frozen=True):
    """Of one size of prompts and one number of streams. Rates are tokens a second: `decode_tps` of one stream behind
    its first token, `total_tps` of all streams together over all their time, `prompt_tps` to the first token.
    """

    prompt_tokens: int
    streams: int
    ttft_s: float
    decode_tps: float
    total_tps: float
    prompt_tps: float
    completion_tokens: float


class Bench:
    """A server and one of its models. `clock`: seconds."""

    def __init__(
        self, url: str, model: str, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._clock = clock
        self._random = random.Random(seed)
        self._tokens: list[int] = []
        self._http = httpx2.AsyncClient(
            trust_env=False,
            headers=local_key.headers(),
            timeout=httpx2.Timeout(_READ_S, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def warm_up(self) -> None:
        """Load the model, and learn its words. Raises `Refused`."""
        body = self._body({"content": TEXT * 4, "add_special": False})
        found = await self._json("/tokenize", body)
        self._tokens = [token for token in found.get("tokens") or [] if isinstance(token, int)]
        if not self._tokens:
            raise refuse(ErrorCode.UNSUPPORTED, f"{self.url} gives no tokens for {self.model or 'its model'}")
        await self._one(self._prompt(WARM_UP), WARM_UP)

    async def measure(self, prompt_tokens: int, streams: int, completion_tokens: int, rounds: int) -> Point:
        """Medians over all answers of all rounds. Raises `Refused`."""
        answers: list[Answered] = []
        totals: list[float] = []
        for _ in range(rounds):
            prompts = [self._prompt(prompt_tokens) for _ in range(streams)]
            began = self._clock()
            found = await asyncio.gather(*(self._one(prompt, completion_tokens) for prompt in prompts))
            spent = max(self._clock() - began, 1e-9)
            answers += found
            totals.append(sum(one.tokens for one in found) / spent)
        first = statistics.median(one.first_s for one in answers)
        return Point(
            prompt_tokens=prompt_tokens,
            streams=streams,
            ttft_s=first,
            decode_tps=statistics.median(one.rate for one in answers),
            total_tps=statistics.median(totals),
            prompt_tps=prompt_tokens / max(first, 1e-9),
            completion_tokens=statistics.fmean(one.tokens for one in answers),
        )

    def _prompt(self, count: int) -> list[int]:
        return self._random.choices(self._tokens, k=count)

    def _body(self, fields: dict[str, Any]) -> bytes:
        return msgspec.json.encode({**fields, "model": self.model} if self.model else fields)

    async def _json(self, path: str, body: bytes) -> dict[str, Any]:
        answer = await self._http.post(f"{self.url}{path}", content=body)
        self._check(answer.status_code, answer.content)
        return msgspec.json.decode(answer.content, type=dict[str, Any])

    async def _one(self, prompt: list[int], most: int) -> Answered:
        body = self._body(
            {
                "prompt": prompt,
                "max_tokens": most,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        began = self._clock()
        first = last = 0.0
        tokens = first_tokens = 0
        async with self._http.stream("POST", f"{self.url}/v1/completions", content=body) as answer:
            if not answer.is_success:
                self._check(answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    raise refuse(ErrorCode.ENGINE_FAULT, f"{self.url}: {chunk['error'].get('message', '')}")
                if chunk.get("usage"):
                    tokens = int(chunk["usage"]["completion_tokens"])
                if any(choice.get("text") for choice in chunk.get("choices") or ()):
                    last = self._clock() - began
                    if not first:
                        first, first_tokens = last, tokens or 1
        if not tokens or not first:
            raise refuse(ErrorCode.ENGINE_FAULT, f"{self.url}: an answer without text; nothing can be timed")
        return Answered(first, last, tokens, first_tokens)

    def _check(self, status: int, content: bytes) -> None:
        if status < 400:
            return
        said = f"{self.url} answers {status}: {words_of(content)}"
        code = {404: ErrorCode.MODEL_NOT_FOUND, 400: ErrorCode.INVALID_REQUEST}.get(
            status, ErrorCode.ENGINE_UNAVAILABLE
        )
        raise refuse(code, said)
