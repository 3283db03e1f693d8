"""Tiny models whose templates show one format of calls or another, and whose marks are tokens where theirs are."""

import json
from pathlib import Path

from shared.wire import ChatPrompt, Tool
from tests.oracles.checkpoints import write_case

SHOWS = {  # what a template has to show
    "json_tags": "<tool_call>",
    "function_tags": "<tool_call><function=",
    "named_function": "<function name=",
    "key_value": "<tool_call><arg_key>",
    "gemma": "<|tool_call>",
    "llama_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS][ARGS]",
    "pythonic": "func_name1(",
    "lfm2": "<|tool_call_start|>",
    "harmony": "<|channel|><|message|>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek_fenced": "<｜tool▁calls▁begin｜>```json",
}
SPECIAL = {  # marks that are tokens outside of text
    "json_tags": ["<tool_call>", "</tool_call>"],
    "gemma": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "mistral": ["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
    "mistral_args": ["[TOOL_CALLS]", "[ARGS]"],
    "harmony": ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"],
    "deepseek": [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
}  # fmt: skip
_SPARE = ["<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<think>", "</think>"]

WEATHER = Tool(
    "weather",
    "of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["wind", "rain"]},
            "on": {"type": "boolean"},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city", "days", "kind"],
        "additionalProperties": False,
    },
)
NOW = Tool("now", "", {"type": "object", "properties": {}, "additionalProperties": False})


def caller(folder: Path, name: str, *, shows: str = "", opens: str = "") -> Path:
    """`shows`: more of what the template shows; `opens`: what it writes behind the prompt for `think`.

    With no name the template has no word of tools.
    """
    write_case("llama_tied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    template = (folder / "chat_template.jinja").read_text()
    shown = f"tools {SHOWS.get(name, '')} {shows}"
    opened = f"{{% if think %}}{{{{ '{opens}' }}}}{{% endif %}}" if opens else ""
    tools = "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}"
    if name:
        (folder / "chat_template.jinja").write_text(f"{tools}{template}{opened}{{# {shown} #}}")
    path = folder / "tokenizer.json"
    tokenizer = path.read_text()
    marks = SPECIAL.get(name, [])
    for mark, spare in zip(marks, _SPARE, strict=False):
        tokenizer = tokenizer.replace(json.dumps(spare), json.dumps(mark, ensure_ascii=False))
    loaded = json.loads(tokenizer)
    for token in loaded["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"]
    path.write_text(json.dumps(loaded))
    return folder


def chat(*tools: Tool, **kwargs: object) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": "the cat"}], kwargs, tools=list(tools))


def fits(name: str, arguments: str) -> bool:
    """Whether a call is one of `WEATHER` or `NOW` as their schemas say, checked by hand."""
    given = json.loads(arguments)
    if name == "now":
        return given == {}
    assert name == "weather"
    listed = given.get("list", [])
    return (
        {"city", "days", "kind"} <= set(given) <= {"city", "days", "kind", "on", "list"}
        and isinstance(given["city"], str)
        and len(given["city"]) <= 6
        and type(given["days"]) is int
        and 0 <= given["days"] <= 99
        and given["kind"] in ("wind", "rain")
        and isinstance(given.get("on", True), bool)
        and len(listed) <= 2
        and all(isinstance(one, bool) for one in listed)
    )
