"""Messages as clients send them, in the form that templates read (normalise): bugs.md A1, A2, A3."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.messages import normalise, thought_style, voiced


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        (None, ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, "b"], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "image_url", "image_url": {}}], [{"type": "image_url", "image_url": {}}]),
        ([], ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_normalise_content(role, content, expected):
    assert normalise([{"role": role, "content": content}]) == [{"role": role, "content": expected}]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "tool_calls": None}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "refusal": None}, {"role": "assistant", "content": "a"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a", "ours": {"not": 1}}, {"role": "user", "content": "a", "ours": {"not": 1}}),
        *(
            ({"role": "assistant", key: "hm"}, {"role": "assistant", "content": "", "reasoning_content": "hm"})
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        ({"role": "assistant", "content": "a", "reasoning_content": ""}, {"role": "assistant", "content": "a"}),
    ],
)  # fmt: skip
def test_normalise_keys(message, expected):
    assert normalise([message]) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{}", {}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("{", "{"),
        ("[1]", "[1]"),
        ("\\d", "\\d"),
        ("[" * 100_000, "[" * 100_000),
        ({"a": 1}, {"a": 1}),
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_normalise_arguments_are_an_object_where_they_parse_to_one(arguments, expected, content):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [changed] = normalise([{"role": "assistant", "tool_calls": [call], **content}])
    assert changed["content"] == ""
    assert changed["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == arguments  # the request itself is left alone


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("", "reasoning_content"),
        ("{{ message.reasoning_content }}{{ message.thinking }}", "reasoning_content"),
        ("{{ message.thinking }}", "thinking"),
        ("{% if message['thinking'] %}", "thinking"),
        ("{% if thinking %}", "reasoning_content"),  # a switch of the template, no field
        ("{% if block['type'] == 'thinking' %}", "blocks"),
        ("{{ message.reasoning }}", "reasoning"),
        ("you may give reasoning before", "reasoning_content"),
    ],
)
def test_where_a_template_looks_for_thoughts(source, style):
    assert thought_style(source) == style


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("reasoning_content", {"content": "a", "reasoning_content": "hm"}),
        ("thinking", {"content": "a", "thinking": "hm"}),
        ("reasoning", {"content": "a", "reasoning": "hm"}),
        ("blocks", {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]}),
    ],
)
def test_thoughts_stand_where_the_template_looks(style, expected):
    assert voiced({"content": "a", "reasoning_content": "hm"}, style) == expected
    assert voiced({"content": "a"}, style) == {"content": "a"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(["role", "content", "tool_calls", "reasoning", "name", "tool_call_id"])


@given(st.lists(st.dictionaries(_KEYS, _JSON, max_size=5), max_size=4))
def test_normalise_takes_any_json_and_changes_nothing_the_second_time(messages):
    once = normalise(messages)
    assert len(once) == len(messages)
    assert normalise(once) == once
