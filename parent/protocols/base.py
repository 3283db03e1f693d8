"""What every public wire format is made of: bytes to a request, events to bytes, failures to bytes. Pure.

A `Protocol` is a record of functions and one line in the table of `parent/protocols/__init__.py`. Its stream
encoder is a `CompletionStreamProtocol`: the request pipeline feeds it events and sends what it returns, and
knows nothing else of any format.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple
from typing import Protocol as Interface

import msgspec

from shared import wire
from shared.errors import ErrorCode, Failure


class Manners(msgspec.Struct, frozen=True):
    """How this server speaks, by its settings.

    `is_strict`: a field that is not known is refused. `reasoning`: under which names OpenAI's formats show thinking.
    """

    is_strict: bool = False
    reasoning: tuple[str, ...] = ("reasoning_content",)


PLAIN = Manners()


class DecodedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request in our words. `model` is the name the client sent, "" = none.

    Each of `prompts` is answered `n` times; the answers ("choices") are numbered prompt by prompt.
    """

    prompts: list[wire.Prompt]
    n: int = 1
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    usage_with_every_chunk: bool = False
    sampling: wire.Sampling = wire.Sampling()
    logprobs: int | None = None
    grammar: wire.Grammar | None = None
    tool_choice: wire.ToolChoice = wire.ToolChoice()
    as_function_call: bool = False  # a call is shown in the form that OpenAI had before tools
    thinking_budget: int | None = None
    echo: bool = False
    max_tokens: int | None = None
    max_context: int = 0  # tokens of prompt and answer; 0 = the model's
    stop: list[str] = []
    seed: int | None = None
    split_reasoning: bool = True
    adapter: list[str] | None = None  # names; [] = none, None = not said
    keep_alive_s: float | None = (
        None  # how long the model stays once idle; inf = for ever, None = as configured
    )

    def to_generate(self, request_id: str, seed: int) -> list[wire.GenerateRequest]:
        """What the worker is asked, choice by choice; `seed` counts where the client gave none."""
        first = self.seed if self.seed is not None else seed
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [
            wire.GenerateRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}/{choice}",
                prompt=prompt,
                seed=(first + choice) % (1 << 63),
                sampling=self.sampling,
                logprobs=self.logprobs,
                grammar=self.grammar,
                tool_choice=self.tool_choice,
                thinking_budget=self.thinking_budget,
                echo=self.echo,
                max_tokens=self.max_tokens,
                max_context=self.max_context,
                stop=self.stop,
                split_reasoning=self.split_reasoning,
            )
            for choice, prompt in enumerate(prompts)
        ]


class Meta(msgspec.Struct, frozen=True):
    """What is the same in every piece of one answer."""

    id: str  # of the request, without a format's prefix
    created: int  # seconds since the epoch
    model: str  # the name the client sent, else the served id
    asked: DecodedRequest
    manners: Manners = PLAIN
    fingerprint: str = ""  # the same as long as model and server are
    request_id: str = ""  # as in the header `x-request-id`

    @property
    def num_choices(self) -> int:
        return len(self.asked.prompts) * self.asked.n


class CompletionStreamProtocol(Interface):
    """Encodes one streamed answer. After the `finish` of the last choice, or `fail`, nothing more is sent."""

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """The frames of a batch of events that ends nothing; b"" where they show nothing."""

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        """The terminal frames of a choice; with those of the last one to end, the stream's."""

    def fail(self, failure: Failure) -> bytes:
        """The one error frame."""


class Part(msgspec.Struct):
    """A stretch of an answer: text, thinking, or a call of a tool, whose `text` are the arguments.

    `logprobs`: of text.
    """

    kind: Literal["text", "reasoning", "tool_call"]
    text: str
    id: str = ""
    name: str = ""
    logprobs: list[wire.Logprob] = []


class Answer(msgspec.Struct):
    """A whole answer, gathered from its events: its parts in their order."""

    parts: list[Part] = []
    prompt: str = ""  # where an echo was asked for
    finish: wire.Finish | None = None

    def add(self, events: list[wire.Event]) -> None:
        """Take events in; `Failed` is not for an answer."""
        for event in events:
            if isinstance(event, wire.Text):
                self._append("text", event.text, event.logprobs)
            elif isinstance(event, wire.Reasoning):
                self._append("reasoning", event.text)
            elif isinstance(event, wire.ToolCall):
                if event.name:
                    self.parts.append(Part("tool_call", event.arguments, event.id, event.name))
                else:
                    self.calls[-1].text += event.arguments
            elif isinstance(event, wire.Started):
                self.prompt = event.prompt
            elif isinstance(event, wire.Finish):
                self.finish = event

    def _append(
        self, kind: Literal["text", "reasoning"], text: str, logprobs: Sequence[wire.Logprob] = ()
    ) -> None:
        if self.parts and self.parts[-1].kind == kind:
            self.parts[-1].text += text
            self.parts[-1].logprobs += logprobs
        elif text or logprobs:
            self.parts.append(Part(kind, text, logprobs=list(logprobs)))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def logprobs(self) -> list[wire.Logprob]:
        """Of its text."""
        return [each for part in self.parts for each in part.logprobs]

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "tool_call"]


class ErrorEncoder(Interface):
    """Status and body of a failure before any header has left."""

    def __call__(self, failure: Failure, request_id: str = "") -> tuple[int, bytes]: ...


class Protocol(NamedTuple):
    """One public wire format. `decode` raises `Refused`; `ping` goes out with each comment that keeps a stream open.

    `media_type`: of a stream. A format that is not server-sent events has no comments, and is silent while it waits.
    """

    name: str
    path: str
    decode: Callable[[bytes, Manners], DecodedRequest]
    stream: Callable[[Meta], CompletionStreamProtocol]
    answer: Callable[[Meta, list[Answer]], bytes]
    error: ErrorEncoder
    ping: bytes = b""
    media_type: bytes = b"text/event-stream; charset=utf-8"
    has_comments: bool = True


STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.TEMPLATE_FAILED: 400,
    ErrorCode.CONTEXT_EXCEEDED: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.REQUEST_TIMEOUT: 408,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.LOADING: 503,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.UNLOADED: 503,
    ErrorCode.CONFLICT: 409,
    ErrorCode.DISK_FULL: 507,
    ErrorCode.HUB: 502,
    ErrorCode.BAD_CHECKPOINT: 503,
    ErrorCode.CANNOT_FIT: 507,
    ErrorCode.WIRE_MISMATCH: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.ENGINE_FAULT: 500,
    ErrorCode.QUARANTINED: 500,
    ErrorCode.INTERNAL: 500,
}
"""The HTTP status of each code; the same in every protocol."""


def retry_headers(failure: Failure) -> list[tuple[bytes, bytes]]:
    """`Retry-After` where trying again helps; where it cannot, a word that the official SDKs obey.

    Of a request that never came whole the rest must not be taken for the next one: its connection ends.
    """
    if failure.code is ErrorCode.REQUEST_TIMEOUT:
        return [(b"connection", b"close")]
    if failure.is_retryable:
        seconds = 1 if failure.retry_after_s is None else max(1, round(failure.retry_after_s))
        return [(b"retry-after", str(seconds).encode())]
    return [(b"x-should-retry", b"false")] if STATUS[failure.code] >= 500 else []
