"""A conversation to the text that the model sees: form, tools, repairs, and an answer that goes on.

Messages are rendered as they were sent, but for what their form needs and what a template would lose of tools. Where
the template refuses them they are brought into what most templates take (`worker.text.repairs`) and rendered again;
where it refuses those too, what it said of the messages as sent is the answer.
"""

from collections.abc import Callable
from typing import Any

from shared.errors import ErrorCode, Refused, refuse
from shared.wire import ChatPrompt
from worker.text import functions
from worker.text.abilities import abilities
from worker.text.messages import Messages, has_calls, normalise, thought_style, voiced
from worker.text.repairs import linked, repaired, with_user
from worker.text.template import ChatTemplate

MARK = "Here-the-answer-goes-on. "
"""Stands after the last words while they are rendered. Its space shows whether the template strips what it prints."""

MOST_PARTED = 1000
"""Calls that are given to a template one by one. It may look through all messages at each, so more are text."""


def render_chat(template: ChatTemplate, prompt: ChatPrompt, *, add_generation_prompt: bool = True) -> str:
    """The text of a prompt. Raises `Refused` (template_failed, invalid_request, unsupported)."""
    messages = normalise(prompt.messages)
    if prompt.continue_final:
        messages, add_generation_prompt = _marked(messages), False
    tools: list[Any] | None = functions.as_functions(prompt.tools) or None
    numbered = list(enumerate(messages))
    if not template.as_sent and _has_late_system(messages) and abilities(template, bool(tools)).drops_system:
        numbered = functions.system_first(numbered)
    if tools or functions.speak_of_tools(messages):
        numbered, tools = _with_tools(template, numbered, tools)
    messages = [message for _, message in numbered]
    source = template.source(bool(tools))
    style = thought_style(source)

    def render(messages: Messages, places: list[int] | None = None) -> str:
        return template.render(
            [voiced(message, style) for message in messages],
            prompt.template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            places=places,
        )

    try:
        text = render(messages, [index for index, _ in numbered])
    except Refused as refused:
        if template.as_sent or refused.failure.code is not ErrorCode.TEMPLATE_FAILED:
            raise
        takes_system = abilities(template, bool(tools)).system
        better = repaired(messages, source, style=style, takes_system=takes_system)
        found = _first_taken(render, [better, with_user(better)])
        if found is None:
            raise
        text = found
    return _cut(text) if prompt.continue_final else text


def _has_late_system(messages: Messages) -> bool:
    return any(message.get("role") == "system" for message in messages[1:])


def _with_tools(
    template: ChatTemplate, numbered: functions.Numbered, tools: list[Any] | None
) -> tuple[functions.Numbered, list[Any] | None]:
    """Whatever of tools the template would lose, in plain text; and the tools that are left for it to write."""
    able = abilities(template, bool(tools))
    if not template.as_sent:
        messages = linked([message for _, message in numbered])
        numbered = [(index, message) for (index, _), message in zip(numbered, messages, strict=True)]
    parts_calls = able.calls and not able.parallel and not template.as_sent
    writes_calls = able.calls
    if parts_calls and functions.num_calls(numbered) <= MOST_PARTED:
        numbered = functions.one_by_one(numbered)
    elif parts_calls or not able.calls:
        numbered = functions.calls_in_text(numbered, template.source(bool(tools)))
        writes_calls = False
    if not able.results or not (writes_calls or (able.tools and not able.calls)):
        numbered = functions.results_in_text(numbered)
    if not tools or able.tools:
        return numbered, tools
    text = functions.description(tools, able.example)
    return functions.described(numbered, text, takes_system=able.system), None


def _first_taken(render: Callable[[Messages], str], attempts: list[Messages]) -> str | None:
    for messages in attempts:
        try:
            return render(messages)
        except Refused:
            continue
    return None


# ---------------------------------------------------------------- an answer that goes on


def _marked(messages: Messages) -> Messages:
    """With a mark after the last words: those of the text, or where there is none, of what was thought."""
    last = messages[-1] if messages else {}
    where = f"messages[{max(0, len(messages) - 1)}]"
    if last.get("role") != "assistant":
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{where}: only a message of the assistant can go on", param=where
        )
    if has_calls(last):
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{where}: a message that calls tools cannot go on", param=where
        )
    content, thought = last["content"], last.get("reasoning_content")
    if thought and not content:
        return [*messages[:-1], {**last, "reasoning_content": thought + MARK}]
    if not isinstance(content, str):
        raise refuse(ErrorCode.INVALID_REQUEST, f"{where}: only text can go on", param=where)
    return [*messages[:-1], {**last, "content": content + MARK}]


def _cut(text: str) -> str:
    """What stands before the mark."""
    before, mark, after = text.rpartition(MARK.strip())
    if not mark:
        raise refuse(
            ErrorCode.TEMPLATE_FAILED,
            "the chat template does not write the last message's text, so the answer cannot go on from it",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()
