"""A question, the model's call of a tool, a result that is given here, and the model's answer."""

import json
from typing import Any

from shared.errors import ErrorCode, refuse
from worker.lab.dataset import texts
from worker.lab.dataset.form import Dropped, Kit, Made, Message, Plan, Unit

CALL_ID = "call_1"


async def plan(kit: Kit) -> Plan:
    """One unit a question with its result. Raises `Refused` (invalid_request)."""
    tools = tools_of(kit.inputs["tools_json"])
    asked, given = texts.lines(kit.inputs["scenarios"]), texts.lines(kit.inputs["mock_results"])
    if len(asked) != len(given):
        raise _bad("mock_results", f"has {len(given)} lines, and inputs.scenarios {len(asked)}")
    return Plan(
        [
            Unit(f"line {one.line}", {"tools": tools, "question": one.text, "result": two.text})
            for one, two in zip(asked, given, strict=True)
        ]
    )


def tools_of(text: str) -> list[Any]:
    """OpenAI's function objects, or what is inside of them, as OpenAI has them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad("tools_json", f"is not JSON: {error}") from None
    tools = found if isinstance(found, list) else [found]
    if not tools:
        raise _bad("tools_json", "names no tool")
    made = []
    for number, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, dict) else tool
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise _bad("tools_json", f"has no name in tool {number}")
        made.append({"type": "function", "function": inner})
    return made


async def make(unit: Unit, kit: Kit) -> Made:
    tools = unit.data["tools"]
    messages: list[Message] = [{"role": "user", "content": unit.data["question"]}]
    first = await kit.ask(messages, tools=tools)
    if not first.calls:
        raise Dropped("the model called no tool")
    name, arguments = first.calls[0]
    if name not in {tool["function"]["name"] for tool in tools}:
        raise Dropped(f"the model called {name[:80]!r}, which is no tool")
    try:
        arguments = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        raise Dropped("the arguments of the call are no JSON") from None
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": first.text.strip(), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": unit.data["result"]},
    ]
    last = await kit.ask(messages, tools=tools)
    if last.calls:
        raise Dropped("the model called a tool again")
    messages.append({"role": "assistant", "content": last.whole()})
    return Made([{"messages": messages, "tools": tools}])


def _bad(field: str, problem: str) -> Exception:
    return refuse(
        ErrorCode.INVALID_REQUEST,
        f"template tool_use_traces: inputs.{field} {problem}",
        param=f"inputs.{field}",
    )
