"""Messages as clients send them, in the shape that templates read."""

import pytest

from worker.text.messages import normalise


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        (None, ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, "b"], "ab"),
        ([{"type": "image_url", "image_url": {}}], [{"type": "image_url", "image_url": {}}]),
        ([], ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content(role, content, expected):
    assert normalise([{"role": role, "content": content}]) == [{"role": role, "content": expected}]


def test_missing_content_counts_as_empty():
    assert normalise([{"role": "assistant", "tool_calls": []}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("{}", {}), ("", {}), ("{", "{"), ("[1]", "[1]"), ({"a": 1}, {"a": 1})],
)
def test_arguments_are_an_object_where_they_parse_to_one(arguments, expected):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    [changed] = normalise([message])
    assert changed["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert call["function"]["arguments"] == arguments  # the request itself is left alone
