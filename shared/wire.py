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

from shared.encoders import Kind
from shared.errors import Failure

# ---------------------------------------------------------------- requests


class Hlg(msgspec.Struct, frozen=True, omit_defaults=True, tag="hlg"):
    """A tone curve over log-probabilities instead of top_p and top_k, after hybrid log-gamma: straight around a
    pivot, logarithmic above `width` nats over it (`shoulder`) and below `width` nats under it (`toe`).

    The pivot is `offset` nats under its base: the likeliest token, minus the entropy, or the token at half of the
    probability. width None = no bound, which leaves the temperature alone.
    """

    width: float | None = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    offset: float = 6.0
    pivot: Literal["top", "entropy", "median"] = "top"


class Curve(msgspec.Struct, frozen=True, omit_defaults=True, tag="curve"):
    """A monotone cubic through control points (x %, y %) instead of temperature, top_p and top_k.

    0 % is a log-probability of `floor` nats, 100 % one of 0; x rises from point to point, y does not fall.
    """

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0), (100.0, 100.0))
    floor: float = -20.0


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is chosen from logits. `None` means: the model's own default, else the built-in one.

    temperature >= 0 (0 = greedy); 0 < top_p <= 1; top_k >= 0 (0 = off); 0 <= min_p <= 1 (0 = off);
    repetition_penalty > 0 (1 = off); presence_penalty and frequency_penalty (0 = off). Each penalty has a window: so
    many of the newest tokens of prompt and answer count (0 = all). xtc_probability 0 to 1 (0 = off), xtc_threshold
    0 to 0.5. `logit_bias`: token id to -100 .. 100, added to its logit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_window: int | None = None
    presence_window: int | None = None
    frequency_window: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: dict[int, float] | None = None
    tone: Hlg | Curve | None = None


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The answer is JSON that fits this JSON schema (`true` = any JSON)."""

    schema: dict[str, Any] | bool


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """The answer is some JSON object."""


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole answer matches `pattern` (syntax of Rust's `regex`, without look-around and back references)."""

    pattern: str


class ContextFree(msgspec.Struct, frozen=True, tag="cfg"):
    """The answer is a sentence of a grammar in Lark's syntax, or in GBNF (EBNF with `::=`)."""

    text: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """The answer is one of these texts."""

    options: list[str]


Grammar = JsonSchema | JsonObject | Regex | ContextFree | Choice
"""What an answer has to be, token by token; thinking before it is free."""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object.

    `strict`: whatever arguments the model writes fit the schema; else that is only asked of it.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the answer calls tools: `auto` = as the model likes; `required` = it does, `name` if that is set.

    `parallel`: more than one call is fine.
    """

    mode: Literal["auto", "required"] = "auto"
    name: str = ""
    parallel: bool = True


class ChatPrompt(msgspec.Struct, frozen=True, omit_defaults=True, tag="chat"):
    """Messages for the model's chat template, in the OpenAI shape (role, content, tool_calls, …).

    `continue_final`: the last message is the assistant's own and goes on; nothing stands between it and the answer.
    """

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] = {}
    tools: list[Tool] = []
    continue_final: bool = False


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
    logprobs: int | None = (
        None  # per token its logprob and those of so many of the likeliest, 0 to 20; None: none
    )
    grammar: Grammar | None = None
    tool_choice: ToolChoice = ToolChoice()  # of the tools that a chat prompt has
    thinking_budget: int | None = None  # tokens of reasoning after which the answer begins; None: no bound
    echo: bool = False  # `Started` has the text of the prompt
    max_tokens: int | None = None
    max_context: int = 0  # tokens that prompt and answer may have together; 0 = the model's
    stop: list[str] = []
    split_reasoning: bool = True
    adapters: list[str] = []  # keys of mounted ones, added in this order
    reader: str = ""  # whose `GET /steps/NAME` the events go to; "" = the body of the answer
    resume: list[int] = []


class RenderRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`POST /render`: the prompt as the model would see it.

    `add_special`: plain text gets what the tokenizer adds. `add_generation_prompt`: messages end with the beginning of
    the assistant's turn.
    """

    prompt: Prompt
    add_special: bool = True
    add_generation_prompt: bool = True


class RenderResult(msgspec.Struct, frozen=True):
    """The rendered text and its token ids."""

    text: str
    ids: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    ids: list[int]


class DetokenizeResult(msgspec.Struct, frozen=True):
    """`text`: as it stands, special tokens too. `pieces`: the bytes of each id."""

    text: str
    pieces: list[bytes]


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`POST /embed`: one vector for each input. `dimensions`: so many of the first, made unit length again; 0 = all.

    Before each text goes `prompt`, or the model's own prompt of the name `prompt_name`, or the one for texts of this
    `role` if it has one; else its default, if it has one. `truncate`: of a longer input the first so many tokens are
    read, -1 = as many as the model can; 0 = it is refused.
    """

    inputs: list[TextPrompt | TokenPrompt]
    dimensions: int = 0
    prompt: str = ""
    prompt_name: str = ""
    role: Literal["", "query", "document"] = ""
    truncate: int = 0


class EmbedResult(msgspec.Struct, frozen=True):
    """`vectors`: float32, little-endian, one row of `dimensions` after the other. `tokens`: of all inputs."""

    vectors: bytes
    dimensions: int
    tokens: int


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /rank`: how well each document answers the query."""

    query: str
    documents: list[str]


class RankResult(msgspec.Struct, frozen=True):
    """`scores`: one a document, more is better: a reranker's through a sigmoid, else the cosine of the vectors.

    `tokens`: of all that was read; a document that is too long is read as far as it goes.
    """

    scores: list[float]
    tokens: int


class MountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /adapters`: hold the adapter of the folder `path` under this key; once it is held the path is not read."""

    key: str
    path: str


class UnmountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`DELETE /adapters`."""

    key: str


class MountedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that a worker holds. `modules`: of the model that it changes; `num_bytes`: in memory."""

    key: str
    path: str
    kind: Literal["lora", "dora"]
    rank: int
    scale: float
    modules: int
    num_bytes: int


class Mounts(msgspec.Struct, frozen=True):
    """The answer of all routes of `/adapters`: what is mounted now."""

    adapters: list[MountedAdapter]


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
    """Admitted. `context_left` = tokens that may still be generated before the context is full.

    `prompt`: its text, where the request asks for an echo.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    context_left: int = 0
    prompt: str = ""


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """`done` of `total` prompt tokens are in the KV cache."""

    done: int
    total: int


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """A token that could have been drawn, what it stands for, and the natural logarithm of its probability."""

    id: int
    logprob: float
    bytes: bytes


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token that was drawn, as `Alternative` has it; `top`: the likeliest tokens in its place, the best first.

    Probabilities are those after bias, penalties and grammar, at temperature 1, before top_p and the like.
    """

    id: int
    logprob: float
    bytes: bytes
    top: list[Alternative] = []


class Text(msgspec.Struct, frozen=True, omit_defaults=True, tag="text"):
    """Answer text of one engine step or more. `ids`: every token consumed since the last content event.

    `logprobs`: one for each of `ids`, where the request asks for them.
    """

    text: str
    ids: list[int] = []
    logprobs: list[Logprob] = []


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True, tag="reasoning"):
    """Thinking text, split off by the model's reasoning format. `ids` and `logprobs` as in `Text`."""

    text: str
    ids: list[int] = []
    logprobs: list[Logprob] = []


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, tag="tool_call"):
    """A piece of a call. The first of each call has its `id` and `name`, and nothing else names it but `index`.

    `index`: 0, 1, … in the order of the calls, which follow each other without overlap. `arguments`: the pieces of a
    call, joined, are a JSON object; where the answer was cut off or the model went astray they are the beginning of
    one. `ids` and `logprobs` as in `Text`.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    ids: list[int] = []
    logprobs: list[Logprob] = []


Content = Text | Reasoning | ToolCall

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


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


Event = Started | Prefill | Content | Finish | Failed


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
    tools: str = ""  # how the model writes calls of tools, "" = its template has no place for tools
    has_chat_template: bool = True
    device: str = ""
    blas: str = ""
    defaults: Sampling = Sampling()
    kind: Kind = "chat"
    dimensions: int = 0  # of its vectors; 0 = none, or not known before one is made


class CacheLookup(msgspec.Struct, frozen=True, kw_only=True):
    """How far a prompt was found among what is kept in memory and on disk, and why not further.

    `from_memory` and `from_disk`: the `reused` tokens by where they were. `common`: its longest common beginning with
    anything kept. `kept` and `asked`: the texts of the first tokens that differ there, "" where nothing follows.
    `reason`: in words.
    """

    prompt_tokens: int
    reused: int
    from_memory: int
    from_disk: int
    common: int
    reason: str
    kept: str = ""
    asked: str = ""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /cache`: what is kept of prompts, and how the last of them were looked up, the newest first."""

    prefix_bytes: int
    prefix_limit: int
    entries: int
    disk_bytes: int
    restored_bytes: int
    lookups: list[CacheLookup]


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
    restored_bytes: int = 0  # of KV, read back from disk so far
    disk_bytes: int = 0  # of kept prompts that lie on disk
    tokens: int = 0  # generated since start
