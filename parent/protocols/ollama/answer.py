"""Answers in Ollama's format: lines of JSON as they come, or one object. Pure.

Calls of tools come whole, their arguments as objects. The last line has `done`, the reason, counts and times.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from parent.protocols import logprobs, partial_json
from parent.protocols.anthropic.answer import is_object
from parent.protocols.base import Answer, Meta
from parent.protocols.logprobs import TokenLogprob
from parent.protocols.ollama.errors import ErrorBody
from parent.protocols.runs import runs
from shared import wire
from shared.errors import Failure


class Moment(NamedTuple):
    """Now: as RFC 3339 has it, and since the request came."""

    stamp: str
    elapsed_ns: int


Clock = Callable[[], Moment]


class CalledFunction(msgspec.Struct, frozen=True):
    """`tool_calls[].function`."""

    index: int
    name: str
    arguments: msgspec.Raw


class Call(msgspec.Struct, frozen=True):
    """`tool_calls[]`."""

    id: str
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The assistant's message, or in a stream a piece of it."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[Call] = []


class Frame(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What each line has; times are nanoseconds, and in the last line only."""

    model: str
    created_at: str
    done: bool
    done_reason: str = ""
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[TokenLogprob] = []


class ChatFrame(Frame, frozen=True, omit_defaults=True, kw_only=True):
    """A line of `/api/chat`."""

    message: Message


class GenerateFrame(Frame, frozen=True, omit_defaults=True, kw_only=True):
    """A line of `/api/generate`."""

    response: str
    thinking: str = ""


class Shown(NamedTuple):
    """What a line shows."""

    text: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    logprobs: tuple[wire.Logprob, ...] = ()


class Ending(NamedTuple):
    """What the last line says beside it."""

    reason: str
    elapsed_ns: int = 0
    finish: wire.Finish | None = None


Line = Callable[[str, str, Shown, Ending | None], Frame]
"""Model, stamp, what is shown, and how it ended, to a line of one of the two routes."""


def chat_line(model: str, stamp: str, shown: Shown, ending: Ending | None) -> ChatFrame:
    """A line of `/api/chat`."""
    message = Message("assistant", shown.text, shown.thinking, list(shown.calls))
    return ChatFrame(
        model=model,
        created_at=stamp,
        message=message,
        done=ending is not None,
        logprobs=logprobs.entries(list(shown.logprobs)),
        **_ended(ending),
    )


def generate_line(model: str, stamp: str, shown: Shown, ending: Ending | None) -> GenerateFrame:
    """A line of `/api/generate`, which offers no tools."""
    return GenerateFrame(
        model=model,
        created_at=stamp,
        response=shown.text,
        thinking=shown.thinking,
        done=ending is not None,
        logprobs=logprobs.entries(list(shown.logprobs)),
        **_ended(ending),
    )


def _ended(ending: Ending | None) -> dict[str, Any]:
    """Of the whole time, what is neither prompt nor answer went by until the model was there for it."""
    if ending is None:
        return {}
    if ending.finish is None:
        return {"done_reason": ending.reason}
    timings, used = ending.finish.timings, ending.finish.usage
    prefill, decode = _ns(timings.prefill_s), _ns(timings.decode_s)
    return {
        "done_reason": ending.reason,
        "total_duration": max(ending.elapsed_ns, prefill + decode),
        "load_duration": max(1, ending.elapsed_ns - prefill - decode),
        "prompt_eval_count": used.prompt_tokens,
        "prompt_eval_duration": prefill,
        "eval_count": used.completion_tokens,
        "eval_duration": decode,
    }


def _ns(seconds: float) -> int:
    """Never 0: clients divide by it."""
    return max(1, round(seconds * 1e9))


def reason(finish: wire.Finish) -> str:
    """Ollama knows no other words; that there are calls shows in them."""
    return "length" if finish.reason == "length" else "stop"


class LineStream:
    """Encodes one streamed answer."""

    def __init__(self, meta: Meta, line: Line, clock: Clock) -> None:
        self._model = meta.model
        self._line = line
        self._clock = clock
        self._call: wire.ToolCall | None = None  # the one that is being written

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """Text and thinking as they come; a call once it is whole."""
        lines = []
        for run in runs(events):
            if isinstance(run, wire.ToolCall):
                lines += self._take(run)
                continue
            lines += self._called()
            if isinstance(run, wire.Text):
                lines.append(self._encode(Shown(text=run.text, logprobs=tuple(run.logprobs))))
            else:
                lines.append(self._encode(Shown(thinking=run.text)))
        return b"".join(lines)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        last = self._encode(Shown(), Ending(reason(finish), self._clock().elapsed_ns, finish))
        return b"".join([*self._called(), last])

    def fail(self, failure: Failure) -> bytes:
        return msgspec.json.encode(ErrorBody(failure.message)) + b"\n"

    def _take(self, piece: wire.ToolCall) -> list[bytes]:
        if self._call is not None and self._call.index == piece.index:
            whole = self._call.arguments + piece.arguments
            self._call = msgspec.structs.replace(self._call, arguments=whole)
            return []
        lines = self._called()
        self._call = piece
        return lines

    def _called(self) -> list[bytes]:
        if self._call is None:
            return []
        call, self._call = self._call, None
        return [self._encode(Shown(calls=(called(call.id, call.name, call.arguments, call.index),)))]

    def _encode(self, shown: Shown, ending: Ending | None = None) -> bytes:
        return encode_line(self._line(self._model, self._clock().stamp, shown, ending))


def encode_line(frame: Frame) -> bytes:
    """One line."""
    return msgspec.json.encode(frame) + b"\n"


def called(id: str, name: str, arguments: str, index: int) -> Call:
    """A call; of arguments that were cut off what is complete of them, and all of it on one line."""
    text = arguments.strip().replace("\n", " ").replace("\r", " ")  # in JSON they stand between values only
    if not is_object(text):
        text = partial_json.closed(text)
        text = text if is_object(text) else "{}"
    return Call(id, CalledFunction(index, name, msgspec.Raw(text.encode())))


def answer(meta: Meta, answers: list[Answer], line: Line, clock: Clock) -> bytes:
    """The body of a request that is not streamed."""
    [whole] = answers
    assert whole.finish is not None
    calls = [called(part.id, part.name, part.text, index) for index, part in enumerate(whole.calls)]
    shown = Shown(whole.text, whole.reasoning, tuple(calls), tuple(whole.logprobs))
    now = clock()
    return encode_line(
        line(meta.model, now.stamp, shown, Ending(reason(whole.finish), now.elapsed_ns, whole.finish))
    )


def moved(model: str, line: Line, clock: Clock, reason: str) -> bytes:
    """The answer where nothing was to be answered: the model was loaded (`load`), or let go (`unload`)."""
    return encode_line(line(model, clock().stamp, Shown(), Ending(reason)))
