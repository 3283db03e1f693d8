"""Chat templates: what Hugging Face templates expect works, and a refusal says which template and message."""

import json

import pytest

from shared.errors import ErrorCode, Refused
from worker.text.template import load_template


def template(tmp_path, source, **config):
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    return load_template(tmp_path, config, {"bos_token": "<s>", "eos_token": "</s>"})


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}", "  user\n"),  # trim_blocks, lstrip_blocks
        ("{% for m in messages %}{% break %}x{% endfor %}-", "-"),
        ("{% generation %}hi{% endgeneration %}", "hi"),
        ('{{ {"b": "é<", "a": 1} | tojson }}', '{"b": "é<", "a": 1}'),
        ('{{ {"b": 1, "a": 2} | tojson(sort_keys=true, separators=(",", ":")) }}', '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ messages | length }}{{ enable_thinking is defined }}", "1False"),
    ],
)
def test_what_templates_expect(tmp_path, source, expected):
    assert template(tmp_path, source).render([user("hi")]) == expected


def test_keyword_arguments_of_the_request_reach_the_template(tmp_path):
    made = template(tmp_path, "{{ enable_thinking }}")
    assert made.render([user("hi")], {"enable_thinking": False}) == "False"


@pytest.mark.parametrize(
    ("files", "config", "tools", "expected"),
    [
        ({}, {"chat_template": "config"}, None, "config"),
        ({"chat_template.jinja": "file"}, {"chat_template": "config"}, None, "file"),
        ({"chat_template.json": json.dumps({"chat_template": "bundle"})}, {}, None, "bundle"),
        (
            {},
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
            None,
            "a",
        ),
        (
            {},
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
            [1],
            "b",
        ),
        (
            {"additional_chat_templates/tool_use.jinja": "extra", "chat_template.jinja": "file"},
            {},
            [1],
            "extra",
        ),
        ({"additional_chat_templates/rag.jinja": "rag", "chat_template.jinja": "file"}, {}, None, "file"),
    ],
)
def test_where_templates_are_found(tmp_path, files, config, tools, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_template(tmp_path, config, {}).render([user("hi")], tools=tools) == expected


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "documents"])
def test_keyword_arguments_cannot_replace_what_the_request_says_itself(tmp_path, name):
    with pytest.raises(Refused, match=f"must not set '{name}'") as caught:
        template(tmp_path, "{{ messages }}").render([user("hi")], {name: []})
    assert caught.value.failure.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "kwargs", "loop", "caller", "range", "1"])
def test_keyword_arguments_of_any_name_do_no_harm(tmp_path, name):
    assert template(tmp_path, "{{ messages[0].content }}").render([user("hi")], {name: 1}) == "hi"


RAISES = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


def test_a_template_that_raises_is_a_refusal_with_its_name_and_the_message_at_fault(tmp_path):
    made = template(tmp_path, RAISES)
    assert made.render([user("a")]) == "a"
    with pytest.raises(Refused) as caught:
        made.render([user("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}])
    failure = caught.value.failure
    assert failure.code is ErrorCode.TEMPLATE_FAILED
    assert failure.param == "messages[2]"
    assert "'default'" in failure.message
    assert "messages[2] (role 'assistant')" in failure.message
    assert "roles must alternate" in failure.message
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",  # a Python error in the template
        "{{ messages[0].missing.deeper }}",
        "{% for m in messages %}{{ m.content.__class__.__mro__ }}{% endfor %}",  # the sandbox refuses
        "{% set _ = messages.append(1) %}",  # immutable
    ],
)
def test_any_error_of_a_template_is_a_refusal(tmp_path, source):
    with pytest.raises(Refused) as caught:
        template(tmp_path, source).render([user("hi")])
    assert caught.value.failure.code is ErrorCode.TEMPLATE_FAILED


def test_a_template_that_does_not_parse_refuses_chat_and_names_the_line(tmp_path):
    made = template(tmp_path, "fine\n{% for %}")
    with pytest.raises(Refused, match=r"'default' .*does not parse: line 2"):
        made.render([user("hi")])


def test_without_a_template_chat_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(Refused, match="no chat template; use /v1/completions"):
        load_template(tmp_path, {}, {}).render([user("hi")])


def test_a_broken_bundle_refuses_the_checkpoint(tmp_path):
    (tmp_path / "chat_template.json").write_text("[1", encoding="utf-8")
    with pytest.raises(Refused) as caught:
        load_template(tmp_path, {}, {})
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT
