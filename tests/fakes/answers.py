"""A chat server on loopback that answers by a function of the tests, and refuses when it is told to.

`with Answers(reply) as server:`; `reply(messages, body)` gives the text, or the whole message. What was asked is in
`asked`, as the clients sent it.
"""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.loopback import Loopback

Reply = Callable[[list[dict[str, Any]], dict[str, Any]], str | dict[str, Any]]
WORDS = ("alpha", "beta", "gamma", "delta")


class Answers:
    """`statuses`: (status, headers) of the next requests, before any is answered. `hold`: requests wait for it."""

    def __init__(self, reply: Reply = lambda messages, body: "yes") -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[tuple[int, dict[str, str]]] = []
        self.finish = "stop"
        self.at_once = self.most_at_once = 0
        self.hold = threading.Event()
        self.hold.set()
        self.came = threading.Event()
        self.url = ""
        self._lock = threading.Lock()

    def __enter__(self) -> "Answers":
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        self._server = Loopback(routes)
        self.url = self._server.url
        return self

    def __exit__(self, *error: object) -> None:
        self.hold.set()
        self._server.close()

    async def _chat(self, request: Request) -> Response:
        body = await _body(request)
        with self._lock:
            self.asked.append(body)
            refused = self.statuses.pop(0) if self.statuses else None
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.came.set()
        try:
            if refused is not None:
                status, headers = refused
                return JSONResponse({"error": {"message": f"status {status}"}}, status, headers)
            await run_in_threadpool(self.hold.wait)
            said = self.reply(body["messages"], body)
        finally:
            with self._lock:
                self.at_once -= 1
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]})

    async def _completion(self, request: Request) -> Response:
        """A stream of words, and their number at its end."""
        body = await _body(request)
        self.asked.append(body)
        count = body["max_tokens"]
        frames = [{"choices": [{"index": 0, "text": WORDS[number % len(WORDS)]}]} for number in range(count)]
        frames.append({"choices": [], "usage": {"completion_tokens": count}})
        lines = [f"data: {msgspec.json.encode(frame).decode()}\n\n" for frame in frames]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    async def _tokenize(self, request: Request) -> Response:
        words = (await _body(request))["content"].split()
        return JSONResponse({"tokens": [len(word) for word in words], "count": len(words)})


async def _body(request: Request) -> dict[str, Any]:
    return msgspec.json.decode(await request.body(), type=dict[str, Any])
