"""What the bodies of Ollama's `/api/chat` and `/api/generate` have in common: options, format, thinking. Pure."""

from typing import Any

import msgspec

from parent.protocols import sampling
from parent.protocols.base import Manners
from parent.protocols.limits import shown
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai import structured as openai_structured
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.sampling import MAX_INT, SamplingFields
from shared import wire

EFFORTS = ("low", "medium", "high", "max")
MAX_STOPS = 64


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`options`. `null` is the same as leaving a field out; names that nobody knows are ignored, as Ollama does."""

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # not here: accepted only with the value that changes nothing
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    # of another engine: without effect
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    num_gqa: Any = None
    numa: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    vocab_only: Any = None
    logits_all: Any = None
    penalize_newline: Any = None
    draft_num_predict: Any = None


NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "typical_p": (None, 0, 1),
    "tfs_z": (None, 0, 1),
    "mirostat": (None, 0),
}


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both bodies. `model` "" or left out: the default one."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # what happens to a prompt that is too long: here it is refused, whatever they say
    truncate: Any = None
    shift: Any = None


def parse(body: bytes, kind: type[openai_fields.Body], manners: Manners) -> openai_fields.Body:
    """Bytes to a body. Raises `Refused` naming the field at fault."""
    return openai_fields.parse(body, kind, manners)


def common(asked: CommonBody) -> dict[str, Any]:
    """The fields of a `DecodedRequest` that both bodies give. Raises `Refused`."""
    options = asked.options or Options()
    for name, neutral in NEUTRAL.items():
        if getattr(options, name) not in neutral:
            raise unsupported(f"options.{name}")
    return {
        "model": asked.model or "",
        "stream": asked.stream is not False,
        "sampling": _sampling(options),
        "logprobs": _logprobs(asked),
        "grammar": _grammar(asked.format),
        "max_tokens": _limit(options.num_predict),
        "max_context": min(max(0, options.num_ctx or 0), MAX_INT),
        "stop": _stops(options.stop),
        "seed": _seed(options.seed),
        "keep_alive_s": openai_fields.kept_for(asked.keep_alive),
    }


def template_kwargs(think: bool | str | None) -> dict[str, Any]:
    """`think` in the template's words. Raises `Refused`."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if think not in EFFORTS:
        raise invalid("think", f"must be true, false, or one of {', '.join(EFFORTS)}, not {shown(think)}")
    return {"enable_thinking": True, "reasoning_effort": think}


def _sampling(options: Options) -> wire.Sampling:
    """A negative `top_k` is off, and of `repeat_last_n` -1 is all and 0 no penalty."""
    last = options.repeat_last_n
    fields = SamplingFields(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=None if options.top_k is None else max(0, options.top_k),
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repeat_penalty=1.0 if last == 0 else options.repeat_penalty,
        repetition_context_size=None if last is None else max(0, last),
    )
    return sampling.sampling(fields)


def _logprobs(asked: CommonBody) -> int | None:
    top = openai_fields.top_logprobs("top_logprobs", asked.top_logprobs or 0)
    return top if asked.logprobs else None


def _grammar(given: str | dict[str, Any] | None) -> wire.Grammar | None:
    if given is None or given == "":
        return None
    if given == "json":
        return wire.JsonObject()
    if isinstance(given, str):
        raise invalid("format", f"must be 'json' or a JSON schema, not {shown(given)}")
    return openai_structured.json_schema(given, "format")


def _limit(num_predict: int | None) -> int | None:
    """0 and less mean no limit."""
    return sampling.clamped(num_predict) if num_predict is not None and num_predict > 0 else None


def _seed(given: int | None) -> int | None:
    """A negative one is drawn anew each time."""
    return None if given is None or given < 0 else given % (1 << 63)


def _stops(given: str | list[str] | None) -> list[str]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise invalid("options.stop", f"at most {MAX_STOPS} stop strings are possible, not {len(stops)}")
    return [stop for stop in stops if stop]
