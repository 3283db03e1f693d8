"""The data channel: what the parent asks a worker for, and the events a worker answers with.

HTTP/1.1 over the worker's Unix socket. `POST /generate` takes a `GenerateRequest` and answers with NDJSON,
one `Event` a line; the last line is always `Finish` or `Failed`. Every content event carries the ids of the
tokens consumed since the event before it, so that the parent can continue a request on another worker:
it sends the ids back as `resume`, the worker replays them silently and goes on from there. A content event
without ids belongs with the next event that has some (or with the end): whoever forwards it waits for that one,
so that what has left always matches a number of ids.

What a token costs is mostly the waking up of whoever reads it. A parent therefore keeps one `GET /steps/NAME` open:
the events of all requests whose `reader` is NAME come there, one `StepFrame` for all rows of an engine step. The
answer of such a `POST /generate` has an empty body: its head says that the request is admitted, closing it cancels,
its end follows the last event. Without a `reader` (a person with curl) the events are the body.
"""

from typing import Any, Literal

import msgspec

from shared.errors import Failure

# ---------------------------------------------------------------- requests


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is chosen from logits. `None` means: the model's own default, else the built-in one.

    temperature >= 0 (0 = greedy); 0 < top_p <= 1; top_k >= 0 (0 = off); 0 <= min_p <= 1 (0 = off).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


class ChatPrompt(msgspec.Struct, frozen=True, omit_defaults=True, tag="chat"):
    """Messages for the model's chat template, in the OpenAI shape (role, content, tool_calls, …)."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """Plain text; special tokens in it are encoded as such, BOS is added where the tokenizer adds it."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids, used as they are."""

    ids: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One completion. `seed` is always set by the parent, so that a resumed request gives the same text."""

    request_id: str
    prompt: Prompt
    seed: int
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    max_context: int = 0  # tokens that prompt and answer may have together; 0 = the model's
    stop: list[str] = []
    split_reasoning: bool = True
    reader: str = ""  # whose `GET /steps/NAME` the events go to; "" = the body of the answer
    resume: list[int] = []


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /render`: the prompt as the model would see it."""

    prompt: Prompt


class RenderResult(msgspec.Struct, frozen=True):
    """The rendered text and its token ids."""

    text: str
    ids: list[int]


# ---------------------------------------------------------------- events


class Usage(msgspec.Struct, frozen=True):
    """Token counts; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds spent in the worker: waiting for a place, prefill (to the first token), decode."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Started(msgspec.Struct, frozen=True, omit_defaults=True, tag="started"):
    """Admitted. `context_left` = tokens that may still be generated before the context is full."""

    prompt_tokens: int
    cached_tokens: int = 0
    context_left: int = 0


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """`done` of `total` prompt tokens are in the KV cache."""

    done: int
    total: int


class Text(msgspec.Struct, frozen=True, omit_defaults=True, tag="text"):
    """Answer text of one engine step or more. `ids`: every token consumed since the last content event."""

    text: str
    ids: list[int] = []


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True, tag="reasoning"):
    """Thinking text, split off by the model's reasoning format. `ids` as in `Text`."""

    text: str
    ids: list[int] = []


FinishReason = Literal["stop", "length", "cancelled"]


class Finish(msgspec.Struct, frozen=True, omit_defaults=True, tag="finish"):
    """The end of a good answer; always the last event. `lane`: how it was scheduled (one word)."""

    reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    stop_sequence: str | None = None
    lane: str = "batched"
    notes: list[str] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The end of an answer that went wrong after the headers had left; always the last event."""

    failure: Failure


Event = Started | Prefill | Text | Reasoning | Finish | Failed


class StepFrame(msgspec.Struct, frozen=True):
    """One line of `GET /steps/NAME`: (request id, its events) for every request that an engine step moved on."""

    parts: list[tuple[str, list[Event]]]


class ModelFacts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a worker knows of its model once it is loaded."""

    family: str
    context: int  # tokens, prompt and answer together
    vocab_size: int
    eos_ids: list[int]
    dtype: str  # of the activations
    quantization: str = ""  # "affine 4-bit group 32", "" = none
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0
    reasoning: bool = False
    has_chat_template: bool = True
    device: str = ""
    blas: str = ""
    defaults: Sampling = Sampling()


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /stats` and the numbers of a heartbeat."""

    steps: int = 0  # engine steps since start
    chunks: int = 0  # prefill chunks since start
    slowest_s: float = (
        0.0  # the longest step so far, the first of its kind (which may compile) left out; 0 = unknown
    )
    active: int = 0  # rows in the batch
    waiting: int = 0  # requests not admitted yet
    active_bytes: int = 0  # memory held by mlx arrays
    peak_bytes: int = 0
    cache_bytes: int = 0  # freed but kept by mlx's allocator
    kv_bytes: int = 0  # KV promised to the active rows
    prefix_bytes: int = 0  # KV kept for reuse
    restored_bytes: int = 0  # of prefix_bytes at start: read back from an earlier worker's spill
    tokens: int = 0  # generated since start
