"""A question in our words, an answer in our words, and the server and clients between them.

A dialect (`tests/conformance/dialects.py` has the table) turns an `Asked` into the arguments of its official SDK and
what comes back, whole or streamed, into a `Said`: so one check serves every protocol that has the feature.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import anthropic
import httpx2
import ollama
import openai
from openai.types import Model

WAIT_S = 120.0
Messages = list[dict[str, Any]]


def user(content: Any = "the cat") -> Messages:
    """A conversation of one turn."""
    return [{"role": "user", "content": content}]


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]


class Asked(NamedTuple):
    """A request. Messages are in OpenAI's chat shape; `more` are fields as they are on the wire.

    `tool_choice`: "", "auto", "required", "none" or the name of a tool. `form`: ("object" | "schema" | "regex" |
    "choice", what). `logprobs`: so many of the likeliest beside each. `thinking`: on, off, or a budget.
    """

    messages: Messages
    max_tokens: int | None = 12
    temperature: float | None = 0
    seed: int | None = 7
    stop: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: str = ""
    parallel: bool = True
    form: tuple[str, Any] | None = None
    logprobs: int | None = None
    n: int = 1
    thinking: bool | int | None = None
    more: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    model: str = ""


class Token(NamedTuple):
    """A token with its log-probability, and those of the likeliest."""

    text: str
    logprob: float
    top: list[float]


class Said(NamedTuple):
    """An answer, however it came. `reason`: stop, length or calls; `calls`: (name, arguments)."""

    texts: list[str]
    reason: str
    calls: list[tuple[str, str]]
    thought: str
    prompt_tokens: int
    tokens: int
    logprobs: list[Token]
    model: str
    stopped_by: str = ""

    @property
    def text(self) -> str:
        [only] = self.texts
        return only


class Server:
    """A running server and a client of each SDK."""

    def __init__(self, url: str, model: str = "") -> None:
        self.url = url.rstrip("/")
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0, timeout=WAIT_S)
        self.ollama = ollama.Client(host=self.url, timeout=WAIT_S, trust_env=False)
        self.http = httpx2.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)
        self.model = model or next(iter(self.openai.models.list())).id
        self.thinks = "thinking" in ((self.row().model_extra or {}).get("capabilities") or ())

    def close(self) -> None:
        for client in (self.openai, self.anthropic, self.ollama._client, self.http):
            client.close()

    def row(self) -> Model:
        """What `/v1/models` says of the model."""
        return self.openai.models.retrieve(self.model)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer."""
        return int((self.row().model_extra or {}).get("context_window") or 1 << 20)

    def settled(self, asked: Asked) -> Asked:
        """A model that thinks answers at once, unless thinking is what is asked about."""
        return asked._replace(thinking=False) if self.thinks and asked.thinking is None else asked

    def own(self, path: str, **body: Any) -> Any:
        """A route outside of `/v1`, by OpenAI's client."""
        client = self.openai.with_options(base_url=self.url)
        more = (
            {"chat_template_kwargs": {"enable_thinking": False}} if self.thinks and "messages" in body else {}
        )
        return client.post(path, body={"model": self.model, **more, **body}, cast_to=object)


class Dialect(NamedTuple):
    """One protocol. `refused` are the SDK's exceptions for a bad request, an unknown model, and a long prompt."""

    title: str
    whole: Callable[[Server, Asked], Said]
    streamed: Callable[[Server, Asked], Said]
    bad_request: type[Exception]
    not_found: type[Exception]
    too_long: str  # what the message of a prompt that does not fit begins with or holds


def both(server: Server, dialect: Dialect, asked: Asked) -> Said:
    """Asked whole and streamed at once; what differs is an error, last digits of log-probabilities excepted."""
    with ThreadPoolExecutor(1) as other:
        coming = other.submit(dialect.streamed, server, asked)
        whole = dialect.whole(server, asked)
        streamed = coming.result()
    assert streamed._replace(logprobs=[]) == whole._replace(logprobs=[]), f"{streamed} is not {whole}"
    assert [token.text for token in streamed.logprobs] == [token.text for token in whole.logprobs]
    for mine, other in zip(streamed.logprobs, whole.logprobs, strict=True):
        pairs = zip([mine.logprob, *mine.top], [other.logprob, *other.top], strict=True)
        assert all(math.isclose(one, two, abs_tol=1e-3) for one, two in pairs), f"{mine} is not {other}"
    return whole
