"""Grammars without a model: what is compiled, kept and masked."""

import numpy as np
import pytest

from shared import wire
from shared.errors import Refused
from tests.oracles.checkpoints import write_case
from worker.engine import grammar
from worker.engine.answer_grammar import Calls
from worker.engine.grammar import Constraint, GrammarCompiler, Thinking, masks
from worker.engine.schema import FORMATS
from worker.text.tokenizer import TextTokenizer, load_tokenizer
from worker.text.toolcalls import FALLBACK

SIZE = 300  # of the model's vocabulary: more than its tokenizer has


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    return load_tokenizer(write_case("llama_tied", tmp_path_factory.mktemp("grammar") / "model"))


@pytest.fixture
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, frozenset({0, 2}), SIZE)


def allowed(constraint: Constraint, size: int = SIZE) -> set[int]:
    return {int(i) for i in np.nonzero(masks([constraint], size)[0])[0]}


def follow(constraint: Constraint, tokenizer: TextTokenizer, text: str) -> bool:
    """Feed a text token by token as the engine does; False where a mask would not have let it through."""
    for token in tokenizer.encode_rendered(text):
        if token not in allowed(constraint):
            return False
        constraint.accept(token)
    return True


def test_every_eos_is_allowed_where_a_sentence_may_end_and_no_padding_ever(compiler, tokenizer):
    constraint = compiler.compile(wire.Regex("(ab)*"))
    [a] = tokenizer.encode_rendered("a")
    assert {0, 2, a} <= allowed(constraint)
    assert max(allowed(constraint)) < tokenizer.vocab_size
    constraint.accept(a)
    assert not {0, 2} & allowed(constraint)
    assert not constraint.is_complete


@pytest.mark.parametrize("size", [272, SIZE, 512])
def test_a_mask_is_as_wide_as_the_logits(compiler, size):
    constraint = compiler.compile(wire.Regex("[a-z]+"))
    assert masks([constraint], size).shape == (1, size)
    assert allowed(constraint, size) == allowed(constraint, 512)


def test_masks_of_many_rows_are_those_of_each(compiler, tokenizer):
    several = [compiler.compile(wire.Regex(form)) for form in ("a+", "[0-9]{3}", "x|yes|no")]
    several[1].accept(tokenizer.encode_rendered("7")[0])
    together = masks(several, SIZE)
    for row, one in zip(together, several, strict=True):
        assert {int(i) for i in np.nonzero(row)[0]} == allowed(one)


def test_a_compiled_grammar_is_kept_and_its_users_do_not_share_a_place(compiler, tokenizer):
    first = compiler.compile(wire.Choice(["ab", "cd"]))
    assert follow(first, tokenizer, "ab")
    second = compiler.compile(wire.Choice(["ab", "cd"]))
    assert len(compiler._kept) == 1
    assert first.is_complete
    assert not second.is_complete
    assert follow(second, tokenizer, "cd")


def test_no_more_than_some_are_kept(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_KEPT", 3)
    for n in range(9):
        compiler.compile(wire.Regex(f"a{{{n + 1}}}"))
    assert len(compiler._kept) == 3


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[T", "T]")])  # tokens of their own, and text
@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (wire.JsonObject(), '{"a": [1, 2]}'),
        (wire.Choice(["yes", 'n"o\n']), 'n"o\n'),
        (wire.Regex(r"\d+/x"), "12/x"),
        (wire.ContextFree('root ::= "a" [0-9]+ "!"'), "a1!"),
        (wire.ContextFree('start: "a" N "!"\nN: /[0-9]+/'), "a1!"),
    ],
)
def test_thoughts_come_first_and_the_answer_is_held_to_its_grammar(
    compiler, tokenizer, marks, wanted, answer
):
    begin, close = marks
    opened, maybe = Thinking(begin, close, True), Thinking(begin, close, False)
    thought = f'so {{ "a", [1 {close[:1]} then{close}\n\n'
    for thinking, text, good in [
        (opened, thought + answer, True),
        (opened, close + answer, True),
        (opened, answer, False),
        (maybe, begin + thought + answer, True),
        (maybe, answer, True),
        (maybe, "so " + answer, False),
        (maybe, "\n" + answer, False),
        (maybe, "\n" + begin + thought + answer, False),
        (opened, thought + "\n" * 9 + answer, False),
        (None, answer, True),
        (None, begin + thought + answer, False),
    ]:
        constraint = compiler.compile(wanted, thinking)
        reached = follow(constraint, tokenizer, text) and constraint.is_complete
        assert reached == good, (thinking, text)
        resumed_at = len(tokenizer.encode_rendered(text)) // 2
        if good:
            ids = tokenizer.encode_rendered(text)
            constraint = compiler.compile(wanted, thinking, ids[:resumed_at])
            for token in ids[resumed_at:]:
                assert token in allowed(constraint)
                constraint.accept(token)
            assert constraint.is_complete


def test_a_tokenizer_that_is_too_large_for_the_model_is_no_obstacle(tokenizer):
    small = GrammarCompiler(tokenizer, frozenset({2}), 100)
    constraint = small.compile(wire.Regex("[a-z ]+"))
    assert masks([constraint], 100).shape == (1, 100)


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_in_one_line(tokenizer, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such\nmodel type")

    monkeypatch.setattr(grammar, "LLTokenizer", broken)
    with pytest.raises(
        Refused, match="cannot be enforced with this model's tokenizer: no such model type"
    ) as caught:
        GrammarCompiler(tokenizer, frozenset({2}), SIZE).compile(wire.Regex("a"))
    assert caught.value.failure.param == "grammar"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (wire.JsonSchema({"type": "object"}), '{"a"%s: 1}'),
        (wire.JsonObject(), '{%s"a": 1}'),
        (wire.JsonSchema(True), "[1,%s2]"),
    ],
    ids=["schema", "object", "any JSON"],
)
def test_white_space_of_json_is_a_line_break_and_an_indentation(compiler, tokenizer, form, text):
    for space, is_allowed in (
        ("", True),
        (" ", True),
        ("\n    ", True),
        ("\r\n\t", True),
        ("\n\n", False),
        (" " * 33, False),
    ):
        assert follow(compiler.compile(form), tokenizer, text % space) is is_allowed, repr(space)


def test_thousands_of_choices_and_optional_properties_are_matched_to_the_end(compiler, tokenizer):
    options = [f'number {i}, "é"\n[a-z]' for i in range(5000)]
    assert follow(compiler.compile(wire.Choice(options)), tokenizer, options[4711])
    assert not follow(compiler.compile(wire.Choice(options)), tokenizer, "number 5000,")
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    assert follow(compiler.compile(wire.JsonSchema(schema)), tokenizer, '{"p1": "x", "p699": "y"}')


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_formats_that_are_known_are_enforced(compiler, tokenizer, form):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": form}}}
    assert not follow(compiler.compile(wire.JsonSchema(schema)), tokenizer, '{"a": "?"}')


def test_formats_that_nobody_knows_say_nothing(compiler, tokenizer):
    text = {"type": "string", "format": "path"}
    schemas = [
        {"properties": {"format": text}, "patternProperties": {"^x": text}, "additionalProperties": text},
        {"anyOf": [{"items": {"$ref": "#/$defs/a"}}, {"type": "null"}], "$defs": {"a": text}},
        {"allOf": [text], "default": {"format": "path"}},
        {"enum": [{"format": "path"}]},
        {"type": "integer", "format": "int64"},
    ]
    answers = ['{"format": "?", "y": "!"}', '["?"]', '"?"', '{"format": "path"}', "5"]
    for schema, answer in zip(schemas, answers, strict=True):
        assert follow(compiler.compile(wire.JsonSchema(schema)), tokenizer, answer), schema


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "must exclude each other; or use anyOf"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/$defs/a"}, "'/$defs/a' does not exist"),
        ({"enum": []}, "Unsatisfiable schema"),
    ],
)
@pytest.mark.parametrize("is_tool", [False, True])
def test_what_cannot_be_enforced_is_told_of_the_schema_alone(compiler, schema, told, is_tool):
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = None if is_tool else wire.JsonSchema(whole)
    calls = Calls(FALLBACK, (wire.Tool("f", "", whole, True),), True, True) if is_tool else None
    with pytest.raises(Refused) as refused:
        compiler.compile(form, calls=calls)
    message = refused.value.failure.message
    assert told in message
    assert not {"start:", "coerce", "%json", "failed to compile"} & set(message.split())
    assert ("tool 'f'" in message) is is_tool
