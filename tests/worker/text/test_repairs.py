"""Messages that a template refused, brought into what most take (normalise): small, pure, and nothing is lost."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.messages import normalise
from worker.text.repairs import linked, repaired, with_user

NINE = "{% if id|length != 9 %}{{ raise_exception('…') }}{% endif %}"


def call(name=None, arguments=None):
    return {
        "type": "function",
        "function": {"name": "f", "arguments": arguments or {}},
        **({"id": name} if name else {}),
    }


def mended(messages, source="", *, style="reasoning_content", takes_system=True):
    return repaired(normalise(messages), source, style=style, takes_system=takes_system)


def chat(*lines):
    """`u hi` = a user says hi; s = system, a = assistant."""
    roles = {"u": "user", "s": "system", "a": "assistant"}
    return [{"role": roles[line[0]], "content": line[2:]} for line in lines]


@pytest.mark.parametrize(
    ("sent", "takes_system", "expected"),
    [
        (chat("u 1", "u 2"), True, chat("u 1\n\n2")),
        (chat("a 1", "a 2", "u 3"), True, chat("a 1\n\n2", "u 3")),
        (chat("s 1", "s 2", "u 3"), True, chat("s 1\n\n2", "u 3")),
        (chat("u 1", "s 2", "u 3"), True, chat("s 2", "u 1\n\n3")),
        (chat("s 1", "u 2", "s 3", "a 4"), True, chat("s 1\n\n3", "u 2", "a 4")),
        (chat("s 1", "u 2"), False, chat("u 1\n\n2")),
        (chat("a 1", "s 2", "u 3"), False, chat("a 1", "u 2\n\n3")),
        (chat("s 1"), False, chat("u 1")),
        (chat("u 1", "a ", "u 2"), True, chat("u 1\n\n2")),
        (chat("u 1", "a  \n", "u 2"), True, chat("u 1\n\n2")),
        (chat("u 1", "a 2", "u 3"), True, chat("u 1", "a 2", "u 3")),
    ],
)
def test_normalise_order_and_roles(sent, takes_system, expected):
    assert mended(sent, takes_system=takes_system) == expected


def test_normalise_text_before_a_call_is_one_message_with_it_and_calls_stay_apart():
    calls = {"role": "assistant", "content": "b", "tool_calls": [call("c1")]}
    [first, second] = mended([*chat("a a"), calls, calls])
    assert (first["content"], first["tool_calls"]) == ("a\n\nb", [call("c1")])
    assert second["content"] == "b"


def test_normalise_an_assistant_that_only_thinks_or_calls_is_kept():
    thinks = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call("c1")]}
    assert mended([thinks]) == [thinks]
    assert mended([calls]) == [calls]


@pytest.mark.parametrize(
    ("calls", "results", "ids"),
    [
        ([None], [None], ["call00001"]),
        ([None, None], [None, None], ["call00001", "call00002"]),
        (["x", "y"], [None, None], ["x", "y"]),
        (["x", "y"], ["y", None], ["y", "x"]),
        (["x"], ["other"], ["other"]),
        ([], [None], [None]),
    ],
)
def test_normalise_results_without_an_id_answer_the_calls_in_order(calls, results, ids):
    history = [{"role": "assistant", "content": "", "tool_calls": [call(name) for name in calls]}] * bool(
        calls
    )
    history += [{"role": "tool", "content": "5", **({"tool_call_id": r} if r else {})} for r in results]
    found = linked(normalise(history))
    assert [m.get("tool_call_id") for m in found if m["role"] == "tool"] == ids


def test_normalise_results_have_the_name_of_their_call():
    history = [
        {"role": "assistant", "content": "", "tool_calls": [call("x")]},
        {"role": "tool", "tool_call_id": "x", "content": "5"},
        {"role": "tool", "tool_call_id": "x", "content": "5", "name": "own"},
        {"role": "tool", "tool_call_id": "unknown", "content": "5"},
    ]
    assert [m.get("name") for m in mended(history)[1:]] == ["f", "own", None]


@pytest.mark.parametrize("name", ["c1", "abcdEF123", "toolu_01A09q90qw90lq917835lq9", "ü"])
def test_normalise_ids_have_nine_letters_and_digits_where_the_template_says_so(name):
    history = [
        {"role": "assistant", "content": "", "tool_calls": [call(name)]},
        {"role": "tool", "tool_call_id": name, "content": "5"},
    ]
    first, second = mended(history, NINE)
    short = second["tool_call_id"]
    assert first["tool_calls"][0]["id"] == short
    assert re.fullmatch("[A-Za-z0-9]{9}", short)
    assert (short == name) == (len(name) == 9)
    assert mended(history)[1]["tool_call_id"] == name


def test_normalise_arguments_that_are_no_object_become_one_that_holds_them():
    [message] = mended([{"role": "assistant", "content": "", "tool_calls": [call("x", "{")]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": "{"}


def test_normalise_thoughts_and_text_beside_a_call_are_one_text_where_only_one_is_taken():
    message = {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [call("x")]}
    assert mended([message], style="thinking")[0]["content"] == "a\n\nb"
    assert mended([message]) == [message]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (chat("u 1"), chat("u 1")),
        (chat("a 1", "u 2"), chat("u ", "a 1", "u 2")),
        (chat("s 1"), chat("s 1", "u ")),
        (chat("s 1", "a 2"), chat("s 1", "u ", "a 2")),
        ([], chat("u ")),
    ],
)
def test_normalise_a_first_user_message(sent, expected):
    assert with_user(sent) == expected


_ROLES = st.sampled_from(["system", "user", "assistant"])


@given(
    st.lists(st.tuples(_ROLES, st.booleans()), max_size=8),
    st.booleans(),
)
def test_normalise_any_order_of_roles_alternates_and_loses_no_text(turns, takes_system):
    texts = [f"<{n}>" if says else "" for n, (_, says) in enumerate(turns)]
    sent = [{"role": role, "content": text} for (role, _), text in zip(turns, texts, strict=True)]
    found = mended(sent, takes_system=takes_system)
    roles = [message["role"] for message in found]
    assert all(a != b for a, b in itertools.pairwise(roles))
    assert "system" not in roles[1 if takes_system else 0 :]
    whole = "".join(message["content"] for message in found)
    assert all(text in whole for text in texts)
    assert mended(found, takes_system=takes_system) == found
