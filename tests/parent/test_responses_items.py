"""Items of the Responses API as messages, in lists, shortened; free text out of arguments, however they are cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols.responses import decode as responses
from parent.protocols.responses import items as responses_items
from parent.protocols.responses import stored as responses_stored
from parent.protocols.responses.custom import CustomInput
from parent.protocols.responses.messages import messages, shortened
from parent.protocols.responses.request import ResponsesRequest
from parent.protocols.responses.sealed import opened, sealed
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SUMMARY = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "so"}],
    "encrypted_content": None,
}
SEALED = {"type": "reasoning", "summary": [], "encrypted_content": sealed("hm, ñ 😀")}
HIDDEN = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
PATCH = {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": 'a\n"b"'}
PATCHED = {
    "type": "custom_tool_call_output",
    "call_id": "c2",
    "output": [{"type": "input_text", "text": "ok"}],
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
USER = {"role": "user", "content": "hi"}


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


F, P = call("f", '{"a": 1}', "c1"), call("p", '{"input":"a\\n\\"b\\""}', "c2")
CASES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a text": ("hi", [{"role": "user", "content": "hi"}]),
    "an easy message": ([USER], [{"role": "user", "content": "hi"}]),
    "what is null": (
        [{"type": None, "id": None, "status": None, "role": "user", "content": "hi"}, {**OUTPUT, "id": None}],
        [{"role": "user", "content": "hi"}, {"role": "tool", "content": "done", "tool_call_id": "c1"}],
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": "ab"}],
    ),
    "a developer": ([{"role": "developer", "content": "Be."}], [{"role": "developer", "content": "Be."}]),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": "No."}],
    ),
    "a turn in pieces": (
        [THOUGHT, SAID, CALL, PATCH, OUTPUT, PATCHED],
        [
            {"role": "assistant", "reasoning_content": "hm", "content": "Hello", "tool_calls": [F, P]},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
            {"role": "tool", "content": "ok", "tool_call_id": "c2"},
        ],
    ),
    "thinking between calls": (
        [THOUGHT, CALL, OUTPUT, SUMMARY, CALL, OUTPUT],
        [
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [F]},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
            {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [F]},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
        ],
    ),
    "thinking in two items": (
        [THOUGHT, SUMMARY, SAID],
        [{"role": "assistant", "reasoning_content": "hm\n\nso", "content": "Hello"}],
    ),
    "thinking that is hidden": ([HIDDEN, SAID], [{"role": "assistant", "content": "Hello"}]),
    "thinking that only we can read": (
        [SEALED, SAID],
        [{"role": "assistant", "reasoning_content": "hm, ñ 😀", "content": "Hello"}],
    ),
    "a call of a namespace": (
        [{**CALL, "namespace": "mcp__x__"}, {**PATCH, "namespace": "crm"}],
        [{"role": "assistant", "content": None, "tool_calls": [
            call("mcp__x__f", '{"a": 1}', "c1"), call("crm__p", P["function"]["arguments"], "c2"),
        ]}],
    ),
    "two texts": ([SAID, SAID], [{"role": "assistant", "content": "Hello"}] * 2),
    "a text after a call": (
        [CALL, SAID],
        [{"role": "assistant", "content": "Hello", "tool_calls": [F]}],
    ),
    "text and thinking among calls": (
        [THOUGHT, SAID, CALL, SUMMARY, SAID, PATCH, OUTPUT, SAID, SUMMARY],
        [
            {
                "role": "assistant",
                "reasoning_content": "hm\n\nso",
                "content": "HelloHello",
                "tool_calls": [F, P],
            },
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Hello"},
            {"role": "assistant", "content": None, "reasoning_content": "so"},
        ],
    ),
    "a result without an id": (
        [{"type": "function_call_output", "output": "x"}],
        [{"role": "tool", "content": "x"}],
    ),
    "what is not known": (
        [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"type": "new_thing"}, SAID],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_responses_items_are_messages(name: str) -> None:
    given_items, expected = CASES[name]
    assert messages(None, responses_items.checked(given_items)) == expected


def test_responses_instructions_come_first() -> None:
    found = messages("Be brief.", responses_items.checked([{"role": "system", "content": "x"}, USER]))
    assert [each["role"] for each in found] == ["system", "system", "user"]
    assert found[0]["content"] == "Be brief."


def test_responses_items_have_ids_that_tell_the_response() -> None:
    request = "0f" * 16
    numbered = responses_items.numbered(
        responses_items.checked([USER, CALL, {**OUTPUT, "id": "mine"}]), request
    )
    ids = [item["id"] for item in numbered]
    assert ids[2] == "mine"
    assert [responses_items.owner_of(each) for each in ids[:2]] == [f"resp_{request}"] * 2
    assert all(item["status"] == "completed" for item in numbered)
    with pytest.raises(Refused, match="no stored item 'mine'"):
        responses_items.owner_of("mine")


def test_responses_references_stand_for_the_items() -> None:
    found = responses_items.checked([{"id": "a"}, {"type": "item_reference", "id": "b"}, USER])
    assert responses_items.references(found) == ["a", "b"]
    known = {"a": {"type": "message"}, "b": CALL}
    assert responses_items.resolved(found, known)[:2] == [{"type": "message"}, CALL]
    with pytest.raises(Refused, match="no stored item 'a'"):
        responses_items.resolved(found, {"b": CALL})


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.text(max_size=8))
def test_responses_sealed_thinking_is_opened_again_and_nothing_else(thought: str, junk: str) -> None:
    assert opened(sealed(thought)) == thought
    assert opened(junk) == opened("mlxd.!" + junk) == opened(None) == opened(sealed("abcd")[:-1]) == ""


# ---------------------------------------------------------------- free text

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join([*map(reader.feed, pieces), reader.end()])


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


@given(texts, st.booleans(), st.lists(st.integers(0, 400), max_size=30), st.sampled_from(["", " ", "\n  "]))
def test_responses_custom_input_is_the_text_however_it_is_cut(
    text: str, is_ascii: bool, places: list[int], space: str
) -> None:
    value = json.dumps(text, ensure_ascii=is_ascii)
    arguments = f'{space}{{{space}"input"{space}:{space}{value}{space}}}'
    assert read(cut(arguments, places)) == text


@given(
    st.text(max_size=12) | st.text('{"input":\\u0d8 e', max_size=20), st.lists(st.integers(0, 99), max_size=9)
)
def test_responses_custom_input_never_depends_on_the_cuts(arguments: str, places: list[int]) -> None:
    for whole in (arguments, f'{{"input": "{arguments}', f'{{"input":"{arguments}"}}'):
        assert read(cut(whole, places)) == read([whole])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"input": "a\nb"}', "a\nb"),
        (r'{"input": "\d+\""}', '\\d+"'),
        (r'{"input": "\ud83d\ude00\ud83d"}', "😀\ufffd"),
        (r'{"input": "\udc00x\ud800\u0041"}', "\ufffdx\ufffdA"),
        (r'{"input": "\u12"}', r"\u12"),
        (r'{"input": "cut \ud83d', "cut \ufffd"),
        (r'{"input": "cut \u00e', "cut "),
        ('{"input": "cut \\', "cut "),
    ],
)
def test_responses_custom_input_of_a_model_gone_astray(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text


# ---------------------------------------------------------------- truncation


def turn(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"{number:03d}" * 10},
        {"role": "assistant", "content": None, "tool_calls": [F]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]


SYSTEM = {"role": "system", "content": "Be."}


@given(st.integers(1, 6), st.floats(0, 1), st.booleans())
def test_responses_shortened_keep_the_beginning_and_the_newest_turns(
    count: int, share: float, has_system: bool
) -> None:
    given_messages = [SYSTEM] * has_system + [each for number in range(count) for each in turn(number)]
    found = shortened(given_messages, share)
    assert found is not None
    assert len(found) < len(given_messages)
    assert found[:has_system] == [SYSTEM] * has_system
    rest = found[has_system:]
    assert rest == given_messages[len(given_messages) - len(rest) :]
    assert rest[0]["role"] in ("user", "assistant")
    again = shortened(found, share)
    while again is not None:
        found, again = again, shortened(again, share)
    assert found[has_system:] == given_messages[-2:]


def too_long(tokens: int) -> Failure:
    return Failure(ErrorCode.CONTEXT_EXCEEDED, "it is", tokens=tokens, most_tokens=100)


def test_responses_truncated_drop_as_much_as_the_counts_say() -> None:
    asked = responses.decode(json.dumps({"input": [USER, {**USER, "content": "x"}] * 50}).encode())

    def left(failure: Failure) -> int:
        shorter = responses.truncated(asked, failure)
        assert isinstance(shorter, ResponsesRequest)
        [prompt] = shorter.prompts
        assert isinstance(prompt, wire.ChatPrompt)
        return len(prompt.messages)

    assert 80 <= left(too_long(101)) <= 90
    assert 8 <= left(too_long(1000)) <= 9
    assert left(too_long(10**9)) == 1
    one = responses.decode(b'{"input": "hi"}')
    assert responses.truncated(one, too_long(101)) is None
    assert responses.truncated(asked, Failure(ErrorCode.QUEUE_FULL, "another")) is None


# ---------------------------------------------------------------- lists


@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from(["asc", "desc"]))
def test_responses_pages_make_the_list(count: int, limit: int, order: str) -> None:
    found = [{"id": f"i{number}"} for number in range(count)]
    query, seen = {"limit": str(limit), "order": order}, []
    while True:
        page = responses_stored.page(found, query)
        seen += page.data
        assert (page.first_id, page.last_id) == (
            (page.data[0]["id"], page.data[-1]["id"]) if page.data else (None, None)
        )
        if not page.has_more:
            break
        query["after"] = page.data[-1]["id"]
    assert seen == (found if order == "asc" else found[::-1])
    if count > 2:
        before = responses_stored.page(found, {"order": "asc", "before": "i2", "after": "i0"})
        assert before.data == [{"id": "i1"}]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "101"}, "limit"), ({"limit": "٣"}, "limit"), ({"limit": "x"}, "limit"),
     ({"order": "up"}, "order"), ({"after": "no"}, "after"), ({"before": "no"}, "before")],
)  # fmt: skip
def test_responses_pages_refuse_what_is_none(query: dict[str, str], param: str) -> None:
    with pytest.raises(Refused) as refused:
        responses_stored.page([{"id": "a"}], query)
    assert refused.value.failure.param == param
