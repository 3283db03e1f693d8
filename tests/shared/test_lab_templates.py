"""The forms of data set templates: what they take, what is filled in, and how every field at fault is named."""

import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ErrorCode, Refused
from shared.lab_templates import TEMPLATES, checked_inputs, template_of
from worker.lab.dataset import MODULES

REQUIRED = {
    template.id: {field.name for field in template.fields if field.required}
    for template in TEMPLATES.values()
}


def test_dataset_templates_are_thirteen_and_each_is_made_by_a_module() -> None:
    assert len(TEMPLATES) == 13
    assert MODULES.keys() == TEMPLATES.keys()
    assert all(template.label and template.description for template in TEMPLATES.values())


def test_an_unknown_dataset_template_is_refused_with_a_near_one() -> None:
    with pytest.raises(Refused, match="did you mean sft_qa_pairs") as refused:
        template_of("sft_qa_pair")
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
    assert refused.value.failure.param == "template"
    with pytest.raises(Refused, match="there is sft_qa_pairs, dpo_pref_pairs"):
        template_of("zzz")


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_missing_field_of_a_dataset_template_is_named(template: str) -> None:
    with pytest.raises(Refused) as refused:
        checked_inputs(template, {})
    for name in REQUIRED[template]:
        assert f"inputs.{name} is missing" in str(refused.value)
    assert (
        refused.value.failure.param
        == f"inputs.{next(f.name for f in TEMPLATES[template].fields if f.required)}"
    )


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"seeds": "a", "variants_per_seed": 0}, "inputs.variants_per_seed must be 1 to 50, not 0"),
        ({"seeds": "a", "variants_per_seed": "many"}, "must be a whole number, not 'many'"),
        ({"seeds": "a", "variants_per_seed": 2.5}, "must be a whole number, not '2.5'"),
        ({"seeds": "a", "variants_per_seed": True}, "must be a whole number, not 'True'"),
        ({"seeds": "a", "variants_per_seed": [1]}, "must be a whole number"),
        ({"seeds": "a", "variants_per_seed": "1e999"}, "must be a whole number"),
        ({"seeds": 3}, "inputs.seeds must be a text"),
        ({"seeds": "  \n "}, "inputs.seeds is missing"),
        ({"seed": "a", "seeds": "a"}, "inputs.seed is no field of it; did you mean seeds?"),
    ],
)
def test_a_field_of_a_dataset_template_says_what_is_wrong(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        checked_inputs("self_instruct", inputs)
    assert said in str(refused.value)


def test_all_faults_of_dataset_inputs_are_told_at_once() -> None:
    with pytest.raises(Refused) as refused:
        checked_inputs("rag_qa", {"questions_per_chunk": 99, "min_chunk_chars": 1})
    said = str(refused.value)
    for name in ("documents", "questions_per_chunk", "min_chunk_chars"):
        assert f"inputs.{name}" in said


def test_dataset_inputs_get_defaults_and_numbers_may_be_texts() -> None:
    assert checked_inputs("self_instruct", {"seeds": " a ", "variants_per_seed": "7"}) == {
        "seeds": " a ",
        "variants_per_seed": 7,
    }
    found = checked_inputs("hf_dataset_import", {"hf_id": " org/set ", "config": None})
    assert found == {
        "hf_id": "org/set",
        "config": "",
        "split": "train",
        "text_column": "text",
        "label_column": "",
        "label_filter": "",
        "max_rows": 1000,
        "min_chars": 200,
        "output_format": "text",
    }
    with pytest.raises(Refused, match="must be one of text, messages_user_only, prompt_completion"):
        checked_inputs("hf_dataset_import", {"hf_id": "org/set", "output_format": "csv"})
    with pytest.raises(Refused, match="must be one of python"):
        checked_inputs("verified_code", {"specs": "a", "language": "rust"})


def test_every_dataset_template_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (●?) ?\| ", page, re.MULTILINE)
    assert {(name, bool(mark)) for name, mark in listed if name in TEMPLATES} == {
        (template.id, template.needs_llm) for template in TEMPLATES.values()
    }
