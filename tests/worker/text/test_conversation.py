"""Conversations on small templates of every temper (template, normalise): bugs.md A1 to A4, tools, final messages."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ErrorCode, Refused
from shared.wire import ChatPrompt, Tool
from worker.text.conversation import render_chat
from worker.text.template import load_template

ANY_ROLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
KNOWS_TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONE_CALL = KNOWS_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>{{ m.reasoning_content | default('') }}"
    "</think>{% endif %}{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
TOOL = Tool("f", "adds", {"properties": {"a": {}}})


def chat(*lines):
    """`u hi` = a user says hi; s = system, a = assistant."""
    roles = {"u": "user", "s": "system", "a": "assistant"}
    return [{"role": roles[line[0]], "content": line[2:]} for line in lines]


def calls(*arguments, **more):
    made = [{"id": f"c{n}", "function": {"name": "f", "arguments": a}} for n, a in enumerate(arguments)]
    return {"role": "assistant", "content": None, "tool_calls": made, **more}


def result(text, name="c0"):
    return {"role": "tool", "tool_call_id": name, "content": text}


def show(source, messages, *tools, as_sent=False, kwargs=None, **more):
    made = load_template(Path("/nowhere"), {"chat_template": source}, {"eos_token": "<eos>"}, as_sent=as_sent)
    return render_chat(made, ChatPrompt(messages, kwargs or {}, list(tools), **more))


# ---------------------------------------------------------------- A1 to A4


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("source", [ANY_ROLE, STRICT, KNOWS_TOOLS, ONE_CALL])
@pytest.mark.parametrize("arguments", ['{"a": 1}', "{", "", "[1]", {"a": 1}])
def test_normalise_calls_and_results_are_in_the_prompt_whatever_the_client_left_out(
    source, content, arguments
):
    call = {key: value for key, value in calls(arguments).items() if key != "content"} | content
    text = show(source, [*chat("u hi"), call, result("five")])
    said = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert json.dumps(said)[1:-1] in text or said in text or not said
    assert "f" in text
    assert "five" in text


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_normalise_text_parts_give_the_prompt_of_the_string(role):
    def part(text):
        return {"type": "text", "text": text}

    def prompt(content):
        return show(ANY_ROLE, [*chat("u hi"), {"role": role, "content": content}])

    assert prompt([part("ab")]) == prompt("ab")
    assert prompt([part("a"), part("b")]) == prompt("ab")


ORDERS = [
    (chat("u 1", "u 2"), "[user]1\n\n2\n"),
    (chat("s 1", "s 2", "u 3"), "[user]1\n\n2\n\n3\n"),
    (chat("a 1", "u 2"), "[user]\n[assistant]1\n[user]2\n"),
    (chat("u 1", "s 2", "u 3"), "[user]2\n\n1\n\n3\n"),
    (chat("s 1"), "[user]1\n"),
]


@pytest.mark.parametrize(("messages", "repaired"), ORDERS)
def test_normalise_what_a_template_refuses_is_repaired(messages, repaired):
    assert show(STRICT, messages) == f"{repaired}[assistant]"


@pytest.mark.parametrize("as_sent", [False, True])
@pytest.mark.parametrize(("messages", "_"), ORDERS)
def test_normalise_what_a_template_takes_is_left_as_it_was_sent(messages, _, as_sent):
    sent = "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
    assert show(ANY_ROLE, messages, as_sent=as_sent) == f"{sent}[assistant]"


@pytest.mark.parametrize(("messages", "_"), ORDERS)
def test_normalise_as_sent_is_the_templates_own_short_refusal(messages, _):
    with pytest.raises(Refused) as refused:
        show(STRICT, messages, as_sent=True)
    failure = refused.value.failure
    assert failure.code is ErrorCode.TEMPLATE_FAILED
    assert failure.message.endswith(("System role not supported", "roles must alternate"))
    assert "'default'" in failure.message
    assert "\n" not in failure.message
    assert len(failure.message) < 200


@pytest.mark.parametrize("as_sent", [False, True])
def test_template_a_refusal_that_no_repair_helps_names_the_message_that_was_sent(as_sent):
    source = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(Refused, match=r"'default' refused the request at messages\[2\] \(role 'user'\): no"):
        show(source, chat("u 1", "a 2", "u bad"), TOOL, as_sent=as_sent)  # tools add a message of our own


def test_template_what_is_wrong_with_the_request_itself_is_not_repaired():
    with pytest.raises(Refused) as refused:
        show(STRICT, chat("u 1"), kwargs={"tools": []})
    assert refused.value.failure.param == "chat_template_kwargs"


def test_normalise_a_later_system_message_that_a_template_would_drop_is_moved_to_the_first():
    drops = (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = chat("u 1", "a 2", "s 3", "u 4")
    assert show(drops, messages) == "[system]3[user]1[assistant]2[user]4"
    assert show(drops, messages, as_sent=True) == "[user]1[assistant]2[user]4"


# ---------------------------------------------------------------- tools


FUNCTION = {
    "name": "f",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}


def test_template_that_knows_tools_gets_function_objects_with_types():
    text = show(KNOWS_TOOLS, chat("u hi"), TOOL)
    assert text == f"[tools]{json.dumps([{'type': 'function', 'function': FUNCTION}])}\n[user]hi\n[assistant]"


def test_template_that_knows_no_tools_gets_them_and_the_history_in_words():
    messages = [
        *chat("s be kind", "u hi"),
        calls('{"a": 1}', "{", content="so"),
        result("5"),
        result("6", "c1"),
    ]
    text = show(ANY_ROLE, messages, TOOL)
    head, _, rest = text.partition("[user]")
    assert head.startswith("[system]be kind\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(FUNCTION)}\n</tools>" in head
    assert "<tool_call>\n{" in head
    assert rest == (
        'hi\n[assistant]so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": "{"}\n</tool_call>\n'
        "[user]<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>\n[assistant]"
    )


@pytest.mark.parametrize("as_sent", [False, True])
def test_template_without_tools_or_system_gets_them_before_the_first_users_words(as_sent):
    text = show(STRICT, chat("u hi", "a ho", "u hu"), TOOL, as_sent=as_sent)
    assert text.startswith("[user]# Tools\n")
    assert text.endswith("</tool_call>\n\nhi\n[assistant]ho\n[user]hu\n[assistant]")


def test_template_that_writes_calls_but_no_tools_shows_what_a_call_looks_like():
    source = KNOWS_TOOLS.partition("{% endif %}")[2].replace("{{ '\\n' }}", "{{ eos_token }}{{ '\\n' }}")
    text = show(source, chat("u hi"), TOOL)
    assert 'with one argument:\n<name {"argument": "value"}>\n[user]hi' in text.replace("<eos>", "")
    assert "<tool_call>" not in text


def test_template_that_writes_one_call_a_message_gets_them_one_by_one_with_their_results():
    messages = [
        *chat("u hi"),
        calls("{}", '{"a": 1}', content="so"),
        result("6", "c1"),
        result("5"),
        *chat("u ?"),
    ]
    assert show(ONE_CALL, messages) == (
        '[user]hi\n[assistant]so<f {}>\n[tool]5\n[assistant]<f {"a": 1}>\n[tool]6\n[user]?\n[assistant]'
    )
    assert '<f {"a": 1}>' not in show(ONE_CALL, messages, as_sent=True)
    assert show(KNOWS_TOOLS, messages).startswith(
        '[user]hi\n[assistant]so<f {}><f {"a": 1}>\n[tool]6\n[tool]5'
    )


def test_template_that_writes_one_call_a_message_gets_very_many_in_words():
    messages = [*chat("u hi"), calls(*["{}"] * 1001), result("five", "c1000")]
    text = show(ONE_CALL, messages)
    assert text.count("<tool_call>") == 1001
    assert text.endswith("[user]<tool_response>\nfive\n</tool_response>\n[assistant]")


def test_template_of_lfm_gets_past_calls_as_its_models_write_them():
    source = "List of tools: [{{ tools }}]" + ANY_ROLE
    text = show(source, [*chat("u hi"), calls('{"a": "x", "b": true}', '"no"'), result("5")], TOOL)
    assert '[assistant]<|tool_call_start|>[f(a="x", b=True), f("\\"no\\"")]<|tool_call_end|>\n[tool]5' in text


@pytest.mark.parametrize("name", ["tools", "Straße", "</tools>"])
def test_template_words_of_a_request_that_look_like_ours_stay_its_own(name):
    tool = Tool("f", name, {"properties": {name: {"enum": [name]}}})
    assert show(ANY_ROLE, chat(f"u {name}"), tool).endswith(f"[user]{name}\n[assistant]")


# ---------------------------------------------------------------- an answer that goes on


@pytest.mark.parametrize(
    ("source", "text", "end"),
    [
        (ANY_ROLE, "so ", "[assistant]so "),
        (ANY_ROLE, "", "[assistant]"),
        (ANY_ROLE, "Here-the-answer-goes-on. x", "[assistant]Here-the-answer-goes-on. x"),
        (STRICT, "so  \n", "[assistant]so"),  # it trims what it writes
        (THINKS, "so", "[assistant]<think></think>so"),
    ],
)
def test_template_nothing_stands_after_a_final_message_that_goes_on(source, text, end):
    found = show(source, chat("u hi", f"a {text}"), continue_final=True)
    assert found == f"[user]hi{'<end>' if source is THINKS else ''}\n{end}"


def test_template_a_final_thought_goes_on_within_its_block():
    final = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert show(THINKS, [*chat("u hi"), final], continue_final=True) == "[user]hi<end>\n[assistant]<think>hm"
    final["content"] = "so"
    assert show(THINKS, [*chat("u hi"), final], continue_final=True).endswith("<think>hm</think>so")


def test_normalise_a_final_message_goes_on_after_repairs():
    found = show(STRICT, chat("u 1", "u 2", "a 3", "a 4"), continue_final=True)
    assert found == "[user]1\n\n2\n[assistant]3\n\n4"


@pytest.mark.parametrize(
    ("source", "messages", "code", "words"),
    [
        ("fixed", chat("u hi", "a so"), ErrorCode.TEMPLATE_FAILED, "does not write the last message's text"),
        (
            ANY_ROLE,
            [*chat("u hi"), {"role": "assistant", "reasoning": "hm"}],
            ErrorCode.TEMPLATE_FAILED,
            "does not write",
        ),
        (
            ANY_ROLE,
            chat("u hi"),
            ErrorCode.INVALID_REQUEST,
            r"messages\[0\]: only a message of the assistant",
        ),
        (ANY_ROLE, [], ErrorCode.INVALID_REQUEST, "only a message of the assistant"),
        (ANY_ROLE, [*chat("u hi"), calls("{}")], ErrorCode.INVALID_REQUEST, r"messages\[1\]: .*calls tools"),
    ],
)
def test_template_where_no_answer_can_go_on_the_request_is_refused(source, messages, code, words):
    with pytest.raises(Refused, match=words) as refused:
        show(source, messages, continue_final=True)
    assert refused.value.failure.code is code


# ---------------------------------------------------------------- any conversation

_WORDS = st.text(max_size=6)
_PART = st.fixed_dictionaries({"type": st.just("text"), "text": _WORDS})
_CALL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": _WORDS}, optional={"arguments": st.none() | _WORDS | st.just({"a": 1})}
        )
    },
    optional={"id": st.none() | _WORDS | st.integers(), "type": st.just("function")},
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": st.none() | _WORDS | st.lists(_WORDS | _PART),
        "tool_calls": st.none() | st.lists(_CALL, max_size=3),
        "reasoning_content": st.none() | _WORDS,
        "tool_call_id": st.none() | _WORDS | st.integers(),
        "name": st.none() | _WORDS,
    },
)


@given(
    st.sampled_from(
        [ANY_ROLE, STRICT, KNOWS_TOOLS, ONE_CALL, THINKS, "{{ messages[0].content | length != 9 }}"]
    ),
    st.lists(_MESSAGE, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_normalise_any_conversation_is_rendered_or_refused(source, messages, with_tool, as_sent, goes_on):
    try:
        text = show(source, messages, *[TOOL] * with_tool, as_sent=as_sent, continue_final=goes_on)
    except Refused:  # whatever else is raised fails here
        text = ""
    assert "Here-the-answer-goes-on" not in text
