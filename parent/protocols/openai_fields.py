"""The fields that both OpenAI completion formats share: checks, sampling, stop, errors, usage. Pure.

Fields that would change the result and that this server does not have are refused by name (`unsupported`);
unknown fields are ignored, as clients send many.
"""

import math
import re
from typing import Any, TypeVar

import msgspec

from parent.protocols import base, limits
from parent.protocols.limits import shown
from shared import wire
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.units import parse_seconds

MAX_STOPS = 4
MAX_TEMPERATURE = 5.0
MAX_INT = (1 << 63) - 1
FOREVER = math.inf


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both bodies. `null` is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    keep_alive: float | str | None = None
    # not here yet: accepted only with the value that changes nothing
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    xtc_probability: float | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    adapter: str | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "xtc_probability": (None, 0),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "adapter": (None, "", "none"),
}


Body = TypeVar("Body", bound=CommonBody)


def invalid(param: str, message: str) -> Refused:
    """To raise: the request is wrong in field `param`."""
    return refuse(ErrorCode.INVALID_REQUEST, f"{param}: {message}", param=param)


def unsupported(param: str, message: str = "is not supported by this server") -> Refused:
    """To raise: the field would change the answer and we do not have it."""
    return refuse(ErrorCode.UNSUPPORTED, f"{param} {message}", param=param)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Bytes to a body. Raises `Refused` with the JSON path of what is wrong."""
    limits.check(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".").partition("[...]")[0]  # `[...]` is some key of an object
        if not field:
            missing = re.search(r"missing required field `(\w+)`", what)
            field = missing[1] if missing else ""
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"the request body: {what}", param=field or None
            ) from None
        raise invalid(field, what) from None
    except RecursionError:
        raise refuse(
            ErrorCode.INVALID_REQUEST, "the request body: objects and lists stand too deep in each other"
        ) from None
    except msgspec.DecodeError as error:
        raise refuse(ErrorCode.INVALID_REQUEST, f"the request body is not JSON: {error}") from None


def check_common(body: CommonBody) -> None:
    """Ranges and unsupported fields. Raises `Refused` naming the field."""
    ranges: list[tuple[str, float | None, bool, str]] = [
        ("temperature", body.temperature, 0 <= (body.temperature or 0) <= MAX_TEMPERATURE, "from 0 to 5"),
        ("top_p", body.top_p, body.top_p is None or 0 < body.top_p <= 1, "above 0 and at most 1"),
        ("top_k", body.top_k, (body.top_k or 0) >= 0, "0 (off) or more"),
        ("min_p", body.min_p, 0 <= (body.min_p or 0) <= 1, "from 0 to 1"),
        ("max_tokens", body.max_tokens, body.max_tokens is None or body.max_tokens >= 1, "1 or more"),
        ("seed", body.seed, abs(body.seed or 0) <= MAX_INT, "an integer of 64 bits"),
    ]
    for name, value, fine, wanted in ranges:
        if not fine:
            raise invalid(name, f"must be {wanted}, not {shown(value)}")
    if body.n is not None and body.n != 1:
        raise (
            invalid("n", f"must be 1, not {shown(body.n)}")
            if body.n < 1
            else unsupported("n", "above 1 is not supported")
        )
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise unsupported(name)


def clamped(count: int | None) -> int | None:
    """A count as the wire can carry it; what is beyond means no limit anyway."""
    return None if count is None else min(count, MAX_INT)


def sampling(body: CommonBody) -> wire.Sampling:
    """The sampling fields; `None` leaves the choice to the model's defaults."""
    return wire.Sampling(body.temperature, body.top_p, clamped(body.top_k), body.min_p)


def seed(body: CommonBody) -> int | None:
    """A seed of the wire: not negative; a negative one is taken modulo 2**63."""
    return None if body.seed is None else body.seed % (1 << 63)


def stops(body: CommonBody) -> list[str]:
    """The stop strings. Raises `Refused`."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are possible, not {len(given)}")
    if "" in given:
        raise invalid("stop", "a stop string must not be empty")
    return given


def wants_usage(body: CommonBody) -> bool:
    """`stream_options.include_usage`."""
    return bool(body.stream_options and body.stream_options.include_usage)


# ---------------------------------------------------------------- answers


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int


class OpenAiUsage(msgspec.Struct, frozen=True):
    """`usage` of a terminal frame or a whole answer; `lane` says how the request was scheduled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    lane: str


def usage(finish: wire.Finish) -> OpenAiUsage:
    """The usage object of a finished answer."""
    used = finish.usage
    return OpenAiUsage(
        used.prompt_tokens,
        used.completion_tokens,
        used.prompt_tokens + used.completion_tokens,
        PromptDetails(used.cached_tokens),
        CompletionDetails(used.reasoning_tokens),
        finish.lane,
    )


class ErrorBody(msgspec.Struct, frozen=True):
    """The inside of `{"error": …}`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorFrame(msgspec.Struct, frozen=True):
    """What every failure looks like to an OpenAI client."""

    error: ErrorBody


_TYPES = {
    ErrorCode.FORBIDDEN: "forbidden",
    ErrorCode.QUEUE_FULL: "resource_admission",
    ErrorCode.ENGINE_UNAVAILABLE: "engine_unavailable",
    ErrorCode.LOADING: "engine_unavailable",
    ErrorCode.SHUTTING_DOWN: "engine_unavailable",
}
_CODES = {ErrorCode.CONTEXT_EXCEEDED: "context_length_exceeded"}  # what clients look for


def error_frame(failure: Failure) -> ErrorFrame:
    """A failure in the shape of OpenAI."""
    fallback = "invalid_request_error" if base.STATUS[failure.code] < 500 else "server_error"
    kind = _TYPES.get(failure.code, fallback)
    code = _CODES.get(failure.code, failure.code.value)
    return ErrorFrame(ErrorBody(failure.message, kind, failure.param, code))


def error(failure: Failure) -> tuple[int, bytes]:
    """Status and body of a failure before any header has left."""
    return base.STATUS[failure.code], msgspec.json.encode(error_frame(failure))


def finish_reason(finish: wire.Finish) -> str:
    """OpenAI has no word for a cancelled answer; nobody is there to read it either."""
    return "stop" if finish.reason == "cancelled" else finish.reason


def kept_for(asked: float | str | None) -> float | None:
    """`keep_alive`: seconds that the model stays once idle, a number or a duration; 0 = not at all.

    Negative = for ever, None = as configured. Raises `Refused`.
    """
    if isinstance(asked, str):
        try:
            seconds = parse_seconds(asked)
        except ValueError as error:
            raise invalid("keep_alive", str(error)) from None
        return FOREVER if seconds is None else seconds
    return FOREVER if asked is not None and asked < 0 else asked
