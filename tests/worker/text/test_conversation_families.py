"""Real chat templates: nothing of a history is lost, and what transformers writes is written, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.wire import ChatPrompt, Tool
from worker.text.abilities import abilities
from worker.text.conversation import render_chat
from worker.text.template import ChatTemplate, load_template

FOLDER = Path(__file__).parent / "templates"
EXPECTED: dict[str, dict[str, str]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"description": "where"}, "units": {"enum": ["metric", "imperial"]}},
    "required": ["city"],
}
TOOLS = [Tool("get_weather", "", SCHEMA)]
SYSTEM = {"role": "system", "content": "SYS"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


ONE = [user("Q1"), says(None, tool_calls=[call("call00001", "Paris")]), result("call00001", "sunny")]
TWO = [
    user("Q1"),
    says("looking", tool_calls=[call("call00001", "Paris"), call("call00002", "Rome")]),
    result("call00001", "sunny"),
    result("call00002", "rainy"),
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Tool], list[str]]] = {
    "plain": ([user("Q1"), says("A1"), user("Q2")], [], ["Q1", "A1", "Q2"]),
    "parts": ([user("Q1"), says([{"type": "text", "text": "A1"}]), user("Q2")], [], ["Q1", "A1", "Q2"]),
    "system": ([SYSTEM, user("Q1")], [], ["SYS", "Q1"]),
    "tools": ([SYSTEM, user("Q1")], TOOLS, ["SYS", "Q1", "get_weather", "city", "metric"]),
    "call": (ONE, TOOLS, ["get_weather", "Paris", "sunny"]),
    "no_tools_now": (ONE, [], ["get_weather", "Paris", "sunny"]),
    "two_calls": (TWO, TOOLS, ["get_weather", "Paris", "sunny", "Rome", "rainy"]),
    "call_then_talk": ([*ONE, says("A1"), user("Q2")], TOOLS, ["Paris", "sunny", "A1", "Q2"]),
    "thought": ([ONE[0], {**ONE[1], "reasoning": "HM"}, ONE[2]], TOOLS, ["Paris", "sunny"]),
    "thought_before": ([user("Q1"), says("A1", reasoning_content="HM"), user("Q2")], [], ["A1", "Q2"]),
    "goes_on": ([user("Q1"), says("A1 goes on ")], [], ["A1 goes on"]),
}


def template(name: str, **more: Any) -> ChatTemplate:
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return load_template(
        Path("/nowhere"), {"chat_template": text}, {"bos_token": "<s>", "eos_token": "</s>"}, **more
    )


def rendered(name: str, conversation: str) -> str:
    messages, tools, _ = CONVERSATIONS[conversation]
    prompt = ChatPrompt(messages, {}, tools, continue_final=conversation == "goes_on")
    return render_chat(template(name), prompt)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_template_and_history_nothing_is_lost(name: str, conversation: str) -> None:
    text = rendered(name, conversation)
    assert [word for word in CONVERSATIONS[conversation][2] if word not in text] == []


@pytest.mark.parametrize(("name", "conversation"), [(n, c) for n, found in EXPECTED.items() for c in found])
def test_template_oracle_transformers_writes_the_same(name: str, conversation: str) -> None:
    assert rendered(name, conversation) == EXPECTED[name][conversation]


@pytest.mark.parametrize(
    ("name", "tools", "calls", "parallel", "results"),
    [
        ("Qwen3.5-4B", True, True, True, True),
        ("deepseek-ai-DeepSeek-V3.1", False, True, True, True),
        ("microsoft-Phi-3.5-mini-instruct", False, False, False, False),
        ("openai-gpt-oss-120b", True, True, False, True),
        ("mistralai-Mistral-Nemo-Instruct-2407", True, True, True, True),
    ],
)
def test_what_a_template_makes_of_tools_is_found_out(
    name: str, tools: bool, calls: bool, parallel: bool, results: bool
) -> None:
    found = abilities(template(name), True)
    assert (found.tools, found.calls, found.parallel, found.results) == (tools, calls, parallel, results)


def test_tools_are_described_with_the_calls_that_the_template_itself_writes() -> None:
    text = rendered("deepseek-ai-DeepSeek-V3.1", "tools")
    assert '<｜tool▁call▁begin｜>name<｜tool▁sep｜>{"argument": "value"}<｜tool▁call▁end｜>' in text
    assert "<tool_call>" not in text


@pytest.mark.parametrize("as_sent", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_template_a_prompt_ends_where_a_final_message_goes_on(name: str, as_sent: bool) -> None:
    prompt = ChatPrompt([user("Q1"), says("A1 goes on ")], continue_final=True)
    assert render_chat(template(name, as_sent=as_sent), prompt).endswith(("A1 goes on ", "A1 goes on"))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Qwen-Qwen3-0.6B", "<|im_start|>assistant\n<think>\nHM so"),
        ("Qwen3.5-4B", "<|im_start|>assistant\n<think>\nHM so"),
        ("GLM-4.7-Flash", "<|assistant|><think>HM so"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[INST]Q1[/INST][THINK]HM so"),
        ("openai-gpt-oss-120b", "<|start|>assistant<|channel|>analysis<|message|>HM so"),
    ],
)
def test_template_a_final_thought_goes_on_where_thoughts_are_written(name: str, end: str) -> None:
    prompt = ChatPrompt([user("Q1"), says("", reasoning_content="HM so")], continue_final=True)
    assert render_chat(template(name), prompt).endswith(end)
