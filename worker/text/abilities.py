"""What a chat template makes of tools and systems: found out by rendering words that can be looked for.

What a template says in its source is no proof: one names `tool_calls` and writes only the first of them, another
prints any role that it is given.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from shared.errors import Refused
from worker.text.messages import Messages
from worker.text.template import ChatTemplate

_SYSTEM, _TOOL, _RESULT, _BEFORE = "probesystem", "probetool", "proberesult", "probebefore"
_NAME, _ARGUMENT, _VALUES = "name", "argument", ("probevalue", "othervalue")
_IDS = ("probe0001", "probe0002")  # nine letters and digits, which some templates demand
_USER = {"role": "user", "content": "hi"}


class Abilities(NamedTuple):
    """What comes through: the tools that there are, past calls, several calls at once, results, a system message.

    `drops_system`: of a second, later one nothing is seen, and nothing is said of it. `example`: a call in the
    template's own words, where it writes calls but not the tools.
    """

    tools: bool
    calls: bool
    parallel: bool
    results: bool
    system: bool
    drops_system: bool
    example: str = ""


@lru_cache(maxsize=8)
def abilities(template: ChatTemplate, with_tools: bool) -> Abilities:
    """Those of the template that is used where the request has tools, or has none."""
    functions: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": _TOOL,
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]

    def show(*messages: dict[str, Any], tools: bool = with_tools) -> str:
        return _rendered(template, list(messages), functions if tools else None)

    one, both = show(_USER, _calls(1), _result(0)), show(_USER, _calls(2), _result(0), _result(1))
    tools, calls = _TOOL in show(_USER, tools=True), _VALUES[0] in one
    late = show(_USER, {"role": "assistant", "content": "hi"}, _say_system(), _USER)
    return Abilities(
        tools=tools,
        calls=calls,
        parallel=all(value in both for value in _VALUES),
        results=_RESULT in one,
        system=_SYSTEM in show(_say_system(), _USER),
        drops_system=bool(late) and _SYSTEM not in late,
        example=_example(template) if calls and not tools else "",
    )


def _calls(count: int, content: str = "") -> dict[str, Any]:
    calls = [
        {
            "id": _IDS[n],
            "type": "function",
            "function": {"name": _NAME, "arguments": {_ARGUMENT: _VALUES[n]}},
        }
        for n in range(count)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _say_system() -> dict[str, Any]:
    return {"role": "system", "content": _SYSTEM}


def _result(n: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _IDS[n], "name": _NAME, "content": _RESULT}


def _example(template: ChatTemplate) -> str:
    """What the template writes of a call, without the marks that end a turn."""
    text = _rendered(template, [_USER, _calls(1, _BEFORE)], None, add_generation_prompt=False)
    call = text.partition(_BEFORE)[2]
    for mark in template.special.values():
        call = call.removesuffix(mark)
    return call.replace(_VALUES[0], "value").strip()


def _rendered(
    template: ChatTemplate, messages: Messages, tools: list[Any] | None, *, add_generation_prompt: bool = True
) -> str:
    """Nothing where the template refuses."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except Refused:
        return ""
