"""The fields that both OpenAI completion formats share: checks, choices, stop, errors. Pure.

Fields that would change the result and that this server does not have are refused by name (`unsupported`);
unknown fields are ignored, as clients send many, unless the server is strict. Of a key that stands twice in an
object the last one counts, as in most JSON readers.
"""

import math
import re
from typing import Any, TypeVar

import msgspec

from parent.protocols import base, limits
from parent.protocols.base import Manners
from parent.protocols.limits import shown
from parent.protocols.openai.structured import StructuredFields
from parent.protocols.refusing import invalid as invalid
from parent.protocols.refusing import unsupported as unsupported
from parent.protocols.sampling import MAX_INT
from parent.protocols.unknown import refuse_unknown
from shared.errors import ErrorCode, Failure, refuse
from shared.units import parse_seconds

MAX_STOPS = 4
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_ADAPTERS = 8
FOREVER = math.inf

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prediction", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "verbosity", "audio",
    }
)  # fmt: skip
"""Known, and without any effect here."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonBody(StructuredFields, frozen=True, kw_only=True):
    """Fields of both bodies. `null` is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    keep_alive: float | str | None = None
    adapter: str | list[str] | None = None
    adapters: str | list[str] | None = None
    # not here: accepted only with the value that changes nothing
    moderation: Any = None
    web_search_options: Any = None
    suffix: str | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "moderation": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
}


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(body: bytes, kind: type[Body], manners: Manners) -> Body:
    """Bytes to a body. Raises `Refused` with the JSON path of what is wrong."""
    limits.check(body)
    try:
        asked = msgspec.json.decode(body, type=kind)
        if manners.is_strict:
            refuse_unknown(msgspec.json.decode(body), kind, IGNORED)
        return asked
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
    check_count("max_tokens", body.max_tokens)
    check_count("n", body.n)
    if abs(body.seed or 0) > MAX_INT:
        raise invalid("seed", f"must be an integer of 64 bits, not {shown(body.seed)}")
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise unsupported(name)


def check_count(name: str, value: int | None) -> None:
    """Raises `Refused` for what is no count."""
    if value is not None and value < 1:
        raise invalid(name, f"must be 1 or more, not {shown(value)}")


def choices(body: CommonBody, num_prompts: int = 1) -> int:
    """How often each prompt is answered. Raises `Refused` where that is too often."""
    n = body.n or 1
    if n * num_prompts > MAX_CHOICES:
        param, each = (
            ("n", "") if num_prompts == 1 else ("prompt", f" ({num_prompts} prompts, n = {shown(n)})")
        )
        raise invalid(param, f"at most {MAX_CHOICES} answers are possible in one request{each}; send several")
    return n


def top_logprobs(name: str, value: int) -> int:
    """How many likely tokens are told beside each. Raises `Refused`."""
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(name, f"must be from 0 to {MAX_LOGPROBS}, not {shown(value)}")
    return value


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


def adapter(body: CommonBody) -> list[str] | None:
    """Names of `adapter`, or of `adapters`; [] = none, None = not said. Raises `Refused`."""
    found: list[str] | None = None
    for name in ("adapter", "adapters"):
        given: str | list[str] | None = getattr(body, name)
        if given is None:
            continue
        names = named_adapters(name, given)
        if found is not None and names != found:
            raise invalid(name, "must not say something else than adapter")
        found = names
    return found


def named_adapters(field: str, given: str | list[str]) -> list[str]:
    """`a+b`, `a,b`, a list of names; `none` and nothing are none. Raises `Refused`."""
    parts = given.replace(",", "+").split("+") if isinstance(given, str) else given
    names = [part.strip() for part in parts]
    if names in ([], [""], ["none"]):
        return []
    if any(not name or name == "none" or set(name) & set("+,:") for name in names):
        raise invalid(field, "must be the name of an adapter, NAME+NAME, a list of names, or none")
    if len(names) > MAX_ADAPTERS:
        raise invalid(field, f"at most {MAX_ADAPTERS} adapters can be added up, not {len(names)}")
    return names


def wants_usage(body: CommonBody) -> bool:
    """`stream_options.include_usage`."""
    return bool(body.stream_options and body.stream_options.include_usage)


def wants_running_usage(body: CommonBody) -> bool:
    """`stream_options.continuous_usage_stats`."""
    return bool(body.stream_options and body.stream_options.continuous_usage_stats)


# ---------------------------------------------------------------- failures


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
_CODES = {  # what clients look for
    ErrorCode.CONTEXT_EXCEEDED: "context_length_exceeded",
    ErrorCode.UNAUTHORIZED: "invalid_api_key",
}


def error_frame(failure: Failure) -> ErrorFrame:
    """A failure in the shape of OpenAI."""
    fallback = "invalid_request_error" if base.STATUS[failure.code] < 500 else "server_error"
    kind = _TYPES.get(failure.code, fallback)
    code = _CODES.get(failure.code, failure.code.value)
    return ErrorFrame(ErrorBody(failure.message, kind, failure.param, code))


def error(failure: Failure, request_id: str = "") -> tuple[int, bytes]:
    """Status and body of a failure before any header has left."""
    return base.STATUS[failure.code], msgspec.json.encode(error_frame(failure))


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
