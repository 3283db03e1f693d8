"""The templates of data sets, as data: what each makes, whether it asks a model, and the fields that it takes.

The rows are made by `worker/lab/dataset/<id>.py`. Adding a template is one row here and one file there. Pure.
"""

import difflib
import math
from typing import Any, Literal

import msgspec

from shared.errors import ErrorCode, refuse

FieldType = Literal["text", "textarea", "number"]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One input. `least`, `most`: of a number; of a number `default` says whether it is a whole one. `choices`: the
    words that a text may be, [] = any.
    """

    name: str
    type: FieldType = "text"
    label: str
    hint: str = ""
    required: bool = False
    default: str | int | float | None = None
    least: float | None = None
    most: float | None = None
    choices: list[str] = []


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """One way to make a data set. `output_format`: of its rows, as people call it."""

    id: str
    label: str
    description: str
    output_format: str
    needs_llm: bool
    fields: list[Field]


def _text(name: str, label: str, hint: str = "", **more: Any) -> Field:
    return Field(name=name, label=label, hint=hint, **more)


def _area(name: str, label: str, hint: str = "", *, required: bool = True) -> Field:
    return Field(name=name, type="textarea", label=label, hint=hint, required=required)


def _number(name: str, label: str, default: int, least: int, most: int, hint: str = "") -> Field:
    return Field(name=name, type="number", label=label, hint=hint, default=default, least=least, most=most)


_ONE_A_LINE = "one a line"
_PARAGRAPHS = "an empty line between two of them"

_ALL = (
    Template(
        id="sft_qa_pairs",
        label="Questions and answers",
        description="Pairs that are written down already, as chats of one turn.",
        output_format="messages",
        needs_llm=False,
        fields=[_area("pairs_text", "Pairs", "Q: … and A: …, an empty line between two pairs")],
    ),
    Template(
        id="dpo_pref_pairs",
        label="Preference pairs",
        description="A CSV table of prompts with the better and the worse answer.",
        output_format="dpo",
        needs_llm=False,
        fields=[_area("csv_text", "CSV", "with the header prompt,chosen,rejected")],
    ),
    Template(
        id="code_completion",
        label="Code completion",
        description="Functions and classes of a folder's Python files, cut in two.",
        output_format="prompt_completion",
        needs_llm=False,
        fields=[
            _text("src_dir", "Folder", "the absolute path of a folder with *.py files", required=True),
            _number("max_pairs", "Most pairs", 500, 1, 1_000_000),
        ],
    ),
    Template(
        id="hf_dataset_import",
        label="Data set of the hub",
        description="Rows of a data set of the Hugging Face hub, by its data set viewer.",
        output_format="text | messages_user_only | prompt_completion",
        needs_llm=False,
        fields=[
            _text("hf_id", "Data set", "ORG/NAME", required=True),
            _text("config", "Configuration", "empty = its first one", default=""),
            _text("split", "Split", default="train"),
            _text("text_column", "Column of the text", default="text"),
            _text("label_column", "Column of the label, or of the completion", default=""),
            _text("label_filter", "Only rows with this label", "needs the column of the label", default=""),
            _number("max_rows", "Most rows", 1000, 0, 10_000_000, "0 = all"),
            _number("min_chars", "Fewest characters of a text", 200, 0, 10_000_000),
            _text(
                "output_format",
                "Format",
                "prompt_completion takes the completion from the column of the label",
                default="text",
                choices=["text", "messages_user_only", "prompt_completion"],
            ),
        ],
    ),
    Template(
        id="format_conversion",
        label="JSONL to chats",
        description="Rows of JSON with a question and an answer under any names.",
        output_format="messages",
        needs_llm=False,
        fields=[
            _area("input_jsonl", "JSONL", "one JSON object a line"),
            _text("user_key", "Name of the question", default="input"),
            _text("assistant_key", "Name of the answer", default="output"),
        ],
    ),
    Template(
        id="style_transfer",
        label="Style transfer",
        description="Each paragraph of a text, written again in the style of samples.",
        output_format="prompt_completion",
        needs_llm=True,
        fields=[
            _area("reference_samples", "Samples of the style"),
            _area("raw_text", "Text", _PARAGRAPHS),
        ],
    ),
    Template(
        id="self_instruct",
        label="Self-instruct",
        description="New instructions like given ones; their answers are left empty.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("seeds", "Instructions", _ONE_A_LINE),
            _number("variants_per_seed", "New ones for each", 5, 1, 50),
        ],
    ),
    Template(
        id="prompt_reconstruction",
        label="Prompt reconstruction",
        description="For each text the prompt that could have led to it; the text itself stays as it is.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("target_text", "Texts", "a line of --- between two of them"),
            _text("style", "Style", default=""),
            _text("tone", "Tone", default=""),
            _text("preserve", "Words and names that the draft has to keep", "commas between", default=""),
            _text("avoid", "What the prompt must not mention", "commas between", default=""),
        ],
    ),
    Template(
        id="multi_turn_chat",
        label="Chats of several turns",
        description="The model answers, and writes what the user would say next, by turns.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("seeds", "First messages", _ONE_A_LINE),
            _number("turns", "Messages in a chat", 4, 2, 40),
            _text("persona", "Who answers", default=""),
            _text("user_persona", "Who asks", default=""),
        ],
    ),
    Template(
        id="tool_use_traces",
        label="Tool use",
        description="A question, the call of a tool, a result that is given here, the answer.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("tools_json", "Tools", "a JSON list of functions, as OpenAI has them"),
            _area("scenarios", "Questions", _ONE_A_LINE),
            _area("mock_results", "Results", "one a line, as many as questions"),
        ],
    ),
    Template(
        id="rag_qa",
        label="Questions about documents",
        description="Questions that a passage answers, with the answers, grounded in the passage.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("documents", "Documents", _PARAGRAPHS),
            _number("questions_per_chunk", "Questions to each passage", 2, 1, 20),
            _number("min_chunk_chars", "Fewest characters of a passage", 200, 40, 100_000),
        ],
    ),
    Template(
        id="cot_synthesis",
        label="Chains of thought",
        description="Questions with thinking and answer.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("questions", "Questions", _ONE_A_LINE),
            _text("category", "Field of knowledge", default=""),
        ],
    ),
    Template(
        id="verified_code",
        label="Code that was run",
        description="Functions with assertions, run in a sandbox without network; rows say whether they hold.",
        output_format="messages",
        needs_llm=True,
        fields=[
            _area("specs", "What the functions do", _ONE_A_LINE),
            _text("language", "Language", default="python", choices=["python"]),
        ],
    ),
)

TEMPLATES: dict[str, Template] = {template.id: template for template in _ALL}

MOST_TEXT = 8 << 20
"""Characters of all inputs together: they are one row of the database, and one message to a worker."""


def template_of(template_id: str) -> Template:
    """Raises `Refused` (invalid_request) that names near matches."""
    template = TEMPLATES.get(template_id)
    if template is None:
        near = difflib.get_close_matches(template_id, TEMPLATES, n=1)
        said = f"did you mean {near[0]}?" if near else f"there is {', '.join(TEMPLATES)}"
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"there is no template {template_id[:80]!r}; {said}", param="template"
        )
    return template


def checked_inputs(template_id: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a template with its defaults. A number may be given as text, as forms send it.

    Raises `Refused` (invalid_request) that names every field at fault; `param` is the first.
    """
    template = template_of(template_id)
    known = {field.name: field for field in template.fields}
    faults: list[tuple[str, str]] = []
    found: dict[str, Any] = {}
    for name in inputs.keys() - known.keys():
        near = difflib.get_close_matches(name, known, n=1)
        faults.append((name, "is no field of it" + (f"; did you mean {near[0]}?" if near else "")))
    for field in template.fields:
        try:
            found[field.name] = _value(field, inputs.get(field.name))
        except ValueError as error:
            faults.append((field.name, str(error)))
    if sum(len(value) for value in found.values() if isinstance(value, str)) > MOST_TEXT:
        faults.append((template.fields[0].name, f"all texts together have more than {MOST_TEXT} characters"))
    if faults:
        said = "; ".join(f"inputs.{name[:80]} {problem}" for name, problem in faults)
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"template {template.id}: {said}", param=f"inputs.{faults[0][0][:80]}"
        )
    return found


def _value(field: Field, given: Any) -> Any:
    if given is None or (isinstance(given, str) and not given.strip()):
        if field.required:
            raise ValueError("is missing")
        return field.default
    if field.type == "number":
        return _number_of(field, given)
    if not isinstance(given, str):
        raise ValueError("must be a text")
    if field.choices and given.strip() not in field.choices:
        raise ValueError(f"must be one of {', '.join(field.choices)}, not {given[:80]!r}")
    return given if field.type == "textarea" else given.strip()


def _number_of(field: Field, given: Any) -> int | float:
    whole = isinstance(field.default, int)
    what = "a whole number" if whole else "a number"
    try:
        value = (
            float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else math.nan
        )
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or (whole and value != int(value)):
        raise ValueError(f"must be {what}, not {str(given)[:80]!r}")
    if (field.least is not None and value < field.least) or (field.most is not None and value > field.most):
        raise ValueError(f"must be {field.least:g} to {field.most:.0f}, not {value:g}")
    return int(value) if whole else value
