"""What stands in front of every route: request id, access policy, keys, and JSON for whatever goes wrong behind it.

What goes wrong on a path of Anthropic's or Ollama's API has its shape, whatever it is; on all others that of OpenAI.
"""

import logging
import re
import secrets

import msgspec
from starlette.exceptions import HTTPException

from parent.access import Policy, Refusal
from parent.keys import Door
from parent.protocols.anthropic import errors as anthropic_errors
from parent.protocols.base import retry_headers
from parent.protocols.ollama import errors as ollama_errors
from parent.protocols.openai import fields as openai_fields
from parent.protocols.responses import stream as responses_stream
from shared import asgi, logs
from shared.errors import ErrorCode, Failure, Refused

log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SAFE = (b"x-content-type-options", b"nosniff")
_ANTHROPIC = "/v1/messages"
_RESPONSES = "/v1/responses"
_MODELS = "/v1/models"
_OURS = frozenset(
    {"jobs", "finetune", "quantize", "dataset", "model", "settings", "gc", "evaluations"}
)  # of what is below /api/


class Front:
    """An ASGI app around the router. `scope` gets `request_id` and `body_send` for what is behind it."""

    def __init__(self, app: asgi.App, policy: Policy, door: Door) -> None:
        self.app = app
        self.policy = policy
        self.door = door

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12).encode()
        scope["request_id"] = request_id.decode()
        scope["app"] = self  # so that the router raises its 405 instead of writing plain text
        scope["body_send"] = send  # for the pieces of a stream, which need no header
        started = False
        names = (b"x-request-id", b"request-id") if _is_anthropic(scope) else (b"x-request-id",)
        told = [*((name, request_id) for name in names), _SAFE]

        async def tell(message: asgi.Message) -> None:
            nonlocal started
            if not started and message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *told]
            await send(message)

        with logs.bind(request=scope["request_id"]):
            try:
                refused = self.policy.refusal(scope["method"], scope["headers"])
                if refused is not None:
                    await _forbid(scope, tell, refused)
                elif unknown := self.door.refusal(scope["path"], scope["headers"]):
                    await _answer(scope, tell, unknown)
                else:
                    await self.app(scope, receive, tell)
            except asgi.ClientGone:
                return
            except Refused as error:
                await _answer(scope, tell, error.failure)
            except HTTPException as error:  # the router's 405
                await _answer(scope, tell, _not_allowed(scope, error), error.status_code)
            except Exception as error:
                log.exception("request.bug")
                if started:
                    raise
                failure = Failure(ErrorCode.INTERNAL, f"a bug in the server: {type(error).__name__}")
                await _answer(scope, tell, failure)


async def not_found(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
    """The router's default."""
    path = scope["path"]
    message = f"there is no {path} here"
    if "/v1/v1" in path:
        right = path.replace("/v1/v1", "/v1")
        message = f"there is no {path} here: the base URL already ends in /v1, so ask for {right}"
    raise Refused(Failure(ErrorCode.NOT_FOUND, message))


def _not_allowed(scope: asgi.Scope, error: HTTPException) -> Failure:
    allowed = (error.headers or {}).get("Allow", "another method")
    return Failure(
        ErrorCode.NOT_FOUND, f"{scope['path']} does not take {scope['method']}; it takes {allowed}"
    )


def _is_anthropic(scope: asgi.Scope) -> bool:
    """`/v1/models` is everybody's: there its clients are known by a header."""
    path: str = scope["path"]
    if path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/"):
        return True
    return path.startswith(_MODELS) and any(name == b"anthropic-version" for name, _ in scope["headers"])


def _is_ollama(scope: asgi.Scope) -> bool:
    _, first, *rest = scope["path"].split("/")
    return first == "api" and bool(rest) and rest[0] not in _OURS


async def _answer(scope: asgi.Scope, send: asgi.Send, failure: Failure, status: int | None = None) -> None:
    if _is_anthropic(scope):
        code, body = anthropic_errors.error(failure, scope["request_id"], status)
    elif _is_ollama(scope):
        code, body = ollama_errors.error(failure)
    elif scope["path"].startswith(_RESPONSES):
        code, body = responses_stream.error(failure)
    else:
        code, body = openai_fields.error(failure)
    headers = retry_headers(failure)
    if failure.code is ErrorCode.UNAUTHORIZED:
        headers = [*headers, (b"www-authenticate", b"Bearer")]
    await asgi.respond(send, status or code, body, headers)


async def _forbid(scope: asgi.Scope, send: asgi.Send, refused: Refusal) -> None:
    if _is_anthropic(scope) or _is_ollama(scope):
        await _answer(scope, send, Failure(ErrorCode.FORBIDDEN, refused.message), refused.status)
        return
    frame = openai_fields.ErrorFrame(
        openai_fields.ErrorBody(refused.message, "forbidden", None, refused.code)
    )
    await asgi.respond(send, refused.status, msgspec.json.encode(frame))
