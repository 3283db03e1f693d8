"""What the tests of calls share: a request's tools, and a parse as one list, however the text was cut."""

from worker.text.reasoning import HARMONY, ReasoningFormat, Start
from worker.text.toolcalls.answer import AnswerParser
from worker.text.toolcalls.form import Format

TOOLS = {
    "get": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "deep": {"type": "object", "properties": {"a": {"type": "string"}}},
            "list": {"type": "array", "items": {"type": "integer"}},
            "on": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "kind": {"enum": ["a", "b"]},
            "ref": {"$ref": "#/$defs/text"},
        },
        "$defs": {"text": {"type": "string"}},
    },
    "now": {"type": "object", "properties": {}},
    "x-1": {},
}

Parsed = list[tuple[str, ...]]


def joined(pieces: list[tuple[str, str]]) -> Parsed:
    """Neighbours of one kind together; a call is (name, arguments), with "…" behind where it is not whole."""
    found: list[list[str]] = []
    for kind, text in pieces:
        if kind == "call":
            found.append([f"call {text}", "", "…"])
        elif kind == "arguments":
            found[-1][1] += text
        elif kind == "end":
            found[-1].pop()
        elif found and found[-1][0] == kind:
            found[-1][1] += text
        else:
            found.append([kind, text])
    return [tuple(one) for one in found]


def parse(
    cuts: list[str],
    form: Format | None,
    thinking: ReasoningFormat | None = None,
    start: Start = Start(None),  # noqa: B008  (a tuple)
    tools: dict | None = None,
) -> Parsed:
    if form is not None and form.name == "harmony":
        thinking, start = HARMONY, Start(None, header=None)
    parser = AnswerParser(form, TOOLS if tools is None else tools, thinking, start)
    return joined([pair for piece in cuts for pair in parser.feed(piece)] + parser.flush())


def every_cut(text: str, form: Format | None, thinking=None, start=Start(None), tools=None) -> Parsed:  # noqa: B008
    """The parse of `text`, the same in one piece, in two, and character by character."""
    whole = parse([text], form, thinking, start, tools)
    assert parse(list(text), form, thinking, start, tools) == whole
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], form, thinking, start, tools) == whole, cut
    return whole
