"""Calls of tools in every format: what is a call, what is text, and that no cut of the stream changes it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.text.calls import TOOLS, every_cut, parse
from tests.worker.text.golden_calls import CASES
from worker.text.reasoning import FORMATS as REASONING
from worker.text.reasoning import Start
from worker.text.toolcalls import TABLE, detect
from worker.text.toolcalls.form import Format

FORMATS = {form.name: form for _, form in TABLE}
ALL = [(name, said, wanted) for name, cases in CASES.items() for said, wanted in cases]


@pytest.mark.parametrize(("name", "said", "wanted"), ALL)
def test_tools_every_cut_of_a_golden_text_gives_the_same_calls_and_text(name, said, wanted):
    assert every_cut(said, FORMATS[name]) == wanted


def test_tools_whole_calls_have_arguments_that_are_json_objects():
    for _, _, wanted in ALL:
        for part in wanted:
            if part[0].startswith("call") and len(part) == 2:
                assert isinstance(json.loads(part[1]), dict)


def _parts(name: str) -> list[str]:
    """Stretches of a format's golden texts, and its marks."""
    texts = [said for said, _ in CASES[name]]
    cut = {said[at : at + size] for said in texts for size in (1, 6, 17) for at in range(0, len(said), 5)}
    return [*sorted(cut), *FORMATS[name].marks, *FORMATS[name].begins]


@pytest.mark.parametrize("name", CASES)
def test_tools_any_text_of_markup_is_cut_at_will_and_nothing_of_it_is_lost(name):
    form: Format = FORMATS[name]

    @given(st.lists(st.sampled_from(_parts(name)), max_size=12), st.randoms(use_true_random=False))
    def holds(parts, random):
        said = "".join(parts)
        wanted = parse([said], form)
        assert parse(list(said), form) == wanted
        cuts = sorted(random.sample(range(len(said) + 1), min(3, len(said))))
        pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        assert parse(pieces, form) == wanted
        if not any(part[0].startswith("call") for part in wanted) and name != "harmony":
            assert "".join(part[1] for part in wanted) == said

    holds()


@pytest.mark.parametrize("name", CASES)
def test_tools_without_tools_in_the_request_nothing_is_a_call(name):
    for said, _ in CASES[name]:
        kinds = {part[0] for part in every_cut(said, None if name != "harmony" else FORMATS[name], tools={})}
        assert kinds <= {"text"} if name != "harmony" else kinds <= {"text", "reasoning"}


@pytest.mark.parametrize("name", CASES)
def test_tools_markup_without_end_is_read_once(name):
    """Text that begins calls over and over takes time in proportion to its length: it is read in one go."""
    form = FORMATS[name]
    begin = {"llama_json": "[{" * 50, "pythonic": "[[("}.get(name, form.lead)
    said = (begin + '{"arguments": {"a": ') * 3000
    assert "".join(part[1] for part in parse([said], form))


SHOWN = [  # what a template shows of calls, and the format that it makes a model write
    ("{{ messages }}", None),
    ("{% for tool in tools %}{{ tool }}{% endfor %}", "json_tags"),
    (
        '{{ tools }} <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
        "json_tags",
    ),
    ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "function_tags"),
    (
        '<function name="function-name"><param name="param-name">param-value</param></function>',
        "named_function",
    ),
    ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>", "key_value"),
    ("{{- '<|tool_call>call:' + function['name'] + '{' -}} <|tool_response>", "gemma"),
    ("{{- '<|channel>thought\\n' }}", None),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama_json"),
    ("Environment: ipython", "llama_json"),
    ("[func_name1(params_name1=params_value1), func_name2()]", "pythonic"),
    ("<|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "lfm2"),
    ("List of tools: [", "lfm2"),
    ("[AVAILABLE_TOOLS] {{ '[TOOL_CALLS][' }}", "mistral"),
    ("{{- '[TOOL_CALLS]' }}{{- name + '[ARGS]' + arguments }}", "mistral_args"),
    ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>", "deepseek"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\\n```json\\n", "deepseek_fenced"),
]


@pytest.mark.parametrize(("template", "name"), SHOWN)
def test_tools_the_format_is_what_the_template_shows(template, name):
    found = detect(template)
    assert (found.name if found is not None else None) == name


CHANNEL, MISTRAL = REASONING[1], REASONING[2]
THINK = REASONING[3]
CALL = '<tool_call>{"name": "now"}</tool_call>'
TURNS = [
    ("json_tags", THINK, None, f"<think>\nHm {CALL}\n</think>\n\nSo.\n{CALL}\n",
     [("reasoning", f"Hm {CALL}\n"), ("text", "So."), ("call now", "{}")]),
    ("json_tags", THINK, None, f"{CALL}\n<think>And?</think>\n{CALL}<think>Done.",
     [("call now", "{}"), ("reasoning", "And?"), ("call now", "{}"), ("reasoning", "Done.")]),
    ("json_tags", THINK, True, f"Hm</think>{CALL} <thin", [("reasoning", "Hm"), ("call now", "{}"), ("text", "<thin")]),
    ("json_tags", THINK, False, f"\n\nSo <think>.{CALL}", [("text", "So <think>."), ("call now", "{}")]),
    ("gemma", CHANNEL, None, "<|channel>thought\nHm.\n<channel|><|tool_call>call:now{}<tool_call|>"
     "<|channel>thought\nAnd?<channel|>So.<|channel>thought<channel|> Yes.",
     [("reasoning", "Hm.\n"), ("call now", "{}"), ("reasoning", "And?"), ("text", "So. Yes.")]),
    ("gemma", CHANNEL, False, "So.<channel|> Yes.", [("text", "So. Yes.")]),
    ("mistral_args", MISTRAL, None, "[THINK]Hm.[/THINK]So.[TOOL_CALLS]now[ARGS]{}[THINK]And?[/THINK]",
     [("reasoning", "Hm."), ("text", "So."), ("call now", "{}"), ("reasoning", "And?")]),
    ("deepseek", THINK, True,
     "Hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
     [("reasoning", "Hm"), ("call now", "{}")]),
    ("llama_json", THINK, None, '<think>Hm</think>\n{"name": "now", "parameters": {}}',
     [("reasoning", "Hm"), ("call now", "{}")]),
    ("pythonic", THINK, None, "  [now()]", [("call now", "{}")]),
    (None, CHANNEL, None, "<|channel>thought\nHm<channel|>a<|channel>x\nb<channel|>c",
     [("reasoning", "Hm"), ("text", "a"), ("reasoning", "b"), ("text", "c")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "thinking", "begins", "said", "wanted"), TURNS)
def test_tools_are_called_before_between_and_after_thoughts(name, thinking, begins, said, wanted):
    form = None if name is None else FORMATS[name]
    assert every_cut(said, form, thinking, Start(begins)) == wanted


ODD = [
    {"properties": "x", "required": 5},
    {"properties": {"city": 5, "days": [], "a": {"anyOf": 5}}},
    {"properties": {name: {"anyOf": 5, "type": [5]} for name in ("city", "days", "a", "on", "list")}},
    {"properties": {name: {"oneOf": {"a": 1}, "enum": 5} for name in ("city", "days", "a", "on", "list")}},
    {"properties": {name: {"$ref": "#/$defs/x"} for name in ("city", "days", "a", "on", "list")},
     "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 9}}},
    {"properties": {name: {"$ref": "#/$defs/x0"} for name in ("city", "days", "a", "on", "list")},
     "$defs": {f"x{n}": {"anyOf": [{"$ref": f"#/$defs/x{n + 1}"}] * 9} for n in range(60)}},
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schema", ODD)
def test_tools_whose_schemas_are_none_are_called_as_those_of_which_nothing_is_known(name, schema):
    for said, _ in CASES[name]:
        tools = dict.fromkeys(TOOLS, schema)
        assert parse([said], FORMATS[name], tools=tools) == parse(
            [said], FORMATS[name], tools={tool: {} for tool in TOOLS}
        )
