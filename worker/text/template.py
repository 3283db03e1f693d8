"""The model's chat template: find it, render it, and say plainly which message it refused.

Templates are data from a model directory, so they run in jinja2's immutable sandbox. What Hugging Face
templates expect is here: `raise_exception`, `strftime_now`, `tojson` with its options, loop controls,
`{% generation %}` blocks, `tools`, `documents`, named templates (transformers, "Chat templates", and its
`utils/chat_template_utils`).
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ErrorCode, Refused, refuse
from shared.files import decode_json, read_regular

Messages = list[dict[str, Any]]

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that a request sets in other ways, or not at all."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateRaised(Exception):
    """The template itself called `raise_exception`."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """The templates of one model by name, and the special tokens they may use.

    `as_sent`: messages that it refuses are not repaired.
    """

    sources: dict[str, str]
    special: dict[str, str]
    compiled: dict[str, jinja2.Template]
    broken: dict[str, str]  # name -> why it does not parse
    as_sent: bool = False

    def source(self, tools: bool = False) -> str:
        """Text of the template that would be used; "" when the model has none."""
        return self.sources.get(self._name(tools), "")

    def render(
        self,
        messages: Messages,
        kwargs: dict[str, Any] | None = None,
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        places: list[int] | None = None,
    ) -> str:
        """The prompt up to where the assistant speaks; `kwargs` are the request's own variables.

        `places`: which message of the request each one is, for a failure to name it; -1 = none of them.
        Raises `Refused` (template_failed, unsupported, invalid_request).
        """
        taken = sorted(RESERVED & set(kwargs or {}))
        if taken:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"chat_template_kwargs must not set {taken[0]!r}: it comes from the request itself",
                param="chat_template_kwargs",
            )
        if not self.sources:
            raise refuse(
                ErrorCode.UNSUPPORTED,
                "this model has no chat template; use /v1/completions with a plain prompt",
                param="messages",
            )
        name = self._name(bool(tools))
        if name in self.broken:
            raise _failure(name, f"it does not parse: {self.broken[name]}")
        values = {
            **self.special,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(kwargs or {}),
        }
        try:
            return self.compiled[name].render(values)
        except Exception as error:  # a template can raise anything; each is the template's refusal
            at = _message_at_fault(error, messages)
            place = at if at is None or places is None else places[at]
            role = "" if at is None else messages[at].get("role")
            raise _failure(name, _reason(error), place, role) from error

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources), "default")


def load_template(
    path: Path, tokenizer_config: dict[str, Any], special: dict[str, str], *, as_sent: bool = False
) -> ChatTemplate:
    """Templates of a model directory. Files win over `tokenizer_config.json`, as in transformers.

    A template that does not parse is kept with its reason: the model can still complete plain text.
    """
    sources = _from_config(tokenizer_config.get("chat_template"))
    bundle = path / "chat_template.json"
    if bundle.is_file():
        try:
            sources |= _from_config(decode_json(bundle.read_bytes()).get("chat_template"))
        except (ValueError, AttributeError) as error:
            raise refuse(ErrorCode.BAD_CHECKPOINT, f"{bundle} is not a JSON object: {error}") from error
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = read_regular(file).decode()
    single = path / "chat_template.jinja"
    if single.is_file():
        sources["default"] = single.read_text(encoding="utf-8")
    environment = _environment()
    compiled: dict[str, jinja2.Template] = {}
    broken: dict[str, str] = {}
    for name, source in sources.items():
        try:
            compiled[name] = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            broken[name] = f"line {error.lineno}: {error.message}"
    return ChatTemplate(sources, special, compiled, broken, as_sent)


def _from_config(value: Any) -> dict[str, str]:
    """One template, a list of `{"name", "template"}`, or an object of names."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    if isinstance(value, list):
        return {
            str(entry["name"]): entry["template"]
            for entry in value
            if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
        }
    return {}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: time.strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this escapes nothing for HTML: the text goes to a model."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise TemplateRaised(message)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, TemplateRaised) else f"{type(error).__name__}: {text}"


def _message_at_fault(error: Exception, messages: Messages) -> int | None:
    """Index of the message the template looked at when it raised: the innermost variable that is one."""
    places = {id(message): index for index, message in enumerate(messages)}
    found: int | None = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            for value in trace.tb_frame.f_locals.values():
                index = getattr(value, "index0", None)  # a loop over messages knows where it is
                if isinstance(index, int) and getattr(value, "length", None) == len(messages):
                    found = index
                elif id(value) in places:
                    found = places[id(value)]
        trace = trace.tb_next
    return found


def _failure(name: str, reason: str, place: int | None = None, role: Any = "") -> Refused:
    where, param = "", "messages"
    if place is not None and place >= 0:  # else it is no message of the request
        where, param = f" at messages[{place}] (role {role!r})", f"messages[{place}]"
    return refuse(
        ErrorCode.TEMPLATE_FAILED,
        f"the chat template {name!r} refused the request{where}: {reason}",
        param=param,
    )
