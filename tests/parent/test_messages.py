"""Messages of a client: shapes are checked here, and nothing of them is changed (the worker does that)."""

from typing import Any

import pytest

from parent.protocols.messages import checked
from shared.errors import Refused

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "5", "name": "f", "of": {"ours": "not"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_normalise_is_not_the_parents_messages_pass_as_they_are(message: dict[str, Any]) -> None:
    given = [dict(message)]
    assert checked(given) == [message]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "system"}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].text"),
    ],
)  # fmt: skip
def test_a_message_of_another_shape_is_refused_by_its_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        checked([message])
    assert refused.value.failure.param == param
