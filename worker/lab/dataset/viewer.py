"""The data set viewer of the hub: JSON by GET, tried again where it is busy.

Its address follows `HF_ENDPOINT` as `datasets` has it: the hub's own name becomes that of its viewer, and a mirror is
asked itself. `HF_DATASETS_SERVER` names another one. The token is that of `huggingface_hub`.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx2
import msgspec

from shared.errors import ErrorCode, Failure, Refused, refuse
from worker.lab.dataset.asking import wait_of

HUB, VIEWER = "https://huggingface.co", "https://datasets-server.huggingface.co"
TRIES = 3
FIRST_S, LONGEST_S = 1.0, 30.0
_BUSY = {408, 425, 429, 500, 502, 503, 504}


def endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Where it is."""
    chosen = environ.get("HF_DATASETS_SERVER") or environ.get("HF_ENDPOINT", HUB).replace(HUB, VIEWER)
    return chosen.rstrip("/")


def token() -> str:
    """The user's token; "" = none."""
    from huggingface_hub import get_token  # slow to import, and only this template wants it

    return get_token() or ""


class Viewer:
    """Asks it. `pause(seconds)` waits."""

    def __init__(
        self,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        url: str = "",
        key: str | None = None,
    ) -> None:
        self.url = url or endpoint()
        self._pause = pause
        self._given = key
        self._key = ""
        self._http: httpx2.AsyncClient | None = None  # most templates need none

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._key = token() if self._given is None else self._given
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._http = httpx2.AsyncClient(timeout=60.0, headers=headers)
        return self._http

    async def fetch(self, path: str, query: Mapping[str, str | int]) -> Any:
        """A JSON object. Raises `Refused`: hub (with `retry_after_s` where trying again may help), invalid_request."""
        tries = 0
        while True:
            patience = 0.0
            try:
                answer = await self._client().get(f"{self.url}{path}", params=dict(query))
            except httpx2.InvalidURL as error:
                raise refuse(ErrorCode.HUB, f"{self.url} is no address: {error}") from None
            except httpx2.TransportError as error:
                said = f"{self.url} does not answer: {' '.join(str(error).split()) or type(error).__name__}"
            else:
                if answer.is_success:
                    return self._object(answer.content)
                said = f"{self.url} answers {answer.status_code} for {query['dataset']}: {_words(answer.content)}"
                if answer.status_code not in _BUSY:
                    raise self._refused(answer.status_code, said)
                patience = wait_of(answer.headers.get("retry-after", ""))
            tries += 1
            delay = min(max(patience, FIRST_S * 2.0 ** (tries - 1)), LONGEST_S)
            if tries >= TRIES:
                raise Refused(Failure(ErrorCode.HUB, self._clean(said), None, delay))
            await self._pause(delay)

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            raise refuse(ErrorCode.HUB, f"{self.url} does not answer as a data set viewer does") from None

    def _refused(self, status: int, said: str) -> Refused:
        if status in (401, 403):
            return refuse(
                ErrorCode.HUB, self._clean(f"{said}; gated or private: set HF_TOKEN to a token that may")
            )
        if status in (404, 422):
            return refuse(ErrorCode.INVALID_REQUEST, self._clean(said), param="inputs.hf_id")
        return refuse(ErrorCode.HUB, self._clean(said))

    def _clean(self, said: str) -> str:
        return said.replace(self._key, "…") if self._key else said


def _words(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"])[:300]
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        return "nothing readable"
