"""The templates of data sets that ask a model: what it is asked, and what of its answers becomes a row."""

import json
from typing import Any

import pytest

from shared.errors import Refused
from tests.worker.lab.building import drops_of, made, rows_of
from worker.lab.dataset.cot_synthesis import parted
from worker.lab.dataset.form import Answer, Dropped, Message


def last(messages: list[Message]) -> str:
    return str(messages[-1]["content"])


def test_a_dataset_of_styles_has_one_answer_a_paragraph() -> None:
    found, _, model = made(
        "style_transfer",
        {"reference_samples": "Arr!", "raw_text": "One.\nStill one.\n\nTwo."},
        lambda messages: f"Arr, {last(messages)}",
    )
    assert rows_of(found) == [
        {"prompt": "One.\nStill one.", "completion": "Arr, One.\nStill one."},
        {"prompt": "Two.", "completion": "Arr, Two."},
    ]
    assert all("Arr!" in asked[0]["content"] and asked[0]["role"] == "system" for asked in model.asked)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("half", is_whole=False), "the answer was cut; raise max_tokens"),
        (Answer(" \n"), "the answer is empty"),
    ],
)
def test_a_dataset_answer_that_is_cut_or_empty_is_no_row(answer: Answer, reason: str) -> None:
    found, _, _ = made("style_transfer", {"reference_samples": "a", "raw_text": "b"}, lambda messages: answer)
    assert rows_of(found) == []
    assert drops_of(found) == [("line 1", reason)]


def test_a_dataset_of_new_instructions_leaves_their_answers_empty() -> None:
    found, _, model = made(
        "self_instruct",
        {"seeds": "Count.\n\nSing.", "variants_per_seed": 2},
        lambda messages: "1. Add.\n2. Divide.\n3. Too many." if "Count." in last(messages) else "- Hum.",
    )
    assert [row["messages"] for row in rows_of(found)] == [
        [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
        for text in ("Add.", "Divide.", "Hum.")
    ]
    assert drops_of(found) == [("line 3", "the model wrote fewer instructions than asked for")]
    assert "Write 2 other" in last(model.asked[0])


def test_a_dataset_list_that_was_cut_loses_its_last_item() -> None:
    found, _, _ = made(
        "self_instruct", {"seeds": "a"}, lambda messages: Answer("- one\n- tw", is_whole=False)
    )
    assert [row["messages"][0]["content"] for row in rows_of(found)] == ["one"]


def test_a_dataset_of_prompts_keeps_each_text_as_it_is() -> None:
    text = "The  lamp, Ada said,\nis green."
    found, _, model = made(
        "prompt_reconstruction",
        {"target_text": f"{text}\n---\nOther.", "style": "plain", "preserve": "Ada, Bob", "avoid": "colour"},
        lambda messages: "A draft without her" if "first draft" in last(messages) else "Write about a lamp",
    )
    first, second = rows_of(found)
    assert first["messages"] == [
        {"role": "user", "content": "Write about a lamp\n\nA draft without her"},
        {"role": "assistant", "content": text},
    ]
    assert first["metadata"]["locks"] == [{"text": "Ada", "kept": False}]
    assert second["metadata"]["locks"] == []
    assert "style plain" in last(model.asked[0])
    assert "Keep these as they are: Ada." in last(model.asked[1])


def test_a_dataset_prompt_that_mentions_what_it_must_not_is_dropped() -> None:
    found, _, _ = made(
        "prompt_reconstruction", {"target_text": "a", "avoid": "Green"}, lambda messages: "About green lamps"
    )
    assert drops_of(found) == [("line 1", "the prompt mentions 'Green'")]


@pytest.mark.parametrize(("turns", "length"), [(2, 2), (3, 4), (4, 4), (5, 6)])
def test_a_dataset_chat_alternates_and_ends_with_an_answer(turns: int, length: int) -> None:
    found, _, model = made(
        "multi_turn_chat",
        {"seeds": "Hi", "turns": turns, "persona": "a pirate", "user_persona": "a child"},
        lambda messages: "And then?" if "play the user" in messages[0]["content"] else "Arr.",
    )
    [row] = rows_of(found)
    system, *said = row["messages"]
    assert system == {"role": "system", "content": "a pirate"}
    assert [message["role"] for message in said] == ["user", "assistant"] * (length // 2)
    assert [message["content"] for message in said[:3]] == ["Hi", "Arr.", "And then?"][:length]
    assert len(model.asked) == length - 1
    assert len(set(model.seeds)) == length - 1


TOOLS = json.dumps([{"name": "weather", "parameters": {"type": "object"}}])


def test_a_dataset_of_tools_has_the_call_the_given_result_and_the_answer() -> None:
    def say(messages: list[Message]) -> Answer:
        if messages[-1]["role"] == "tool":
            return Answer(f"It is {last(messages)}.")
        return Answer("", calls=(("weather", '{"city":"Kiel"}'), ("weather", "{}")))

    found, _, model = made(
        "tool_use_traces",
        {"tools_json": TOOLS, "scenarios": "Rain?\n\nSun?", "mock_results": "wet\ndry"},
        say,
    )
    first, second = rows_of(found)
    assert first["messages"] == [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Kiel"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
        {"role": "assistant", "content": "It is wet."},
    ]
    assert first["tools"] == model.tools[0]
    assert model.tools[0] == [{"type": "function", "function": json.loads(TOOLS)[0]}]
    assert second["messages"][-1]["content"] == "It is dry."


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("no call"), "the model called no tool"),
        (Answer("", calls=(("other", "{}"),)), "the model called 'other', which is no tool"),
        (Answer("", calls=(("weather", "{"),)), "the arguments of the call are no JSON"),
        (Answer("", calls=(("weather", "{}"),)), "the model called a tool again"),
    ],
)
def test_a_dataset_call_that_is_none_is_dropped(answer: Answer, reason: str) -> None:
    inputs = {"tools_json": TOOLS, "scenarios": "a", "mock_results": "b"}
    found, _, _ = made("tool_use_traces", inputs, lambda messages: answer)
    assert drops_of(found) == [("line 1", reason)]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            {"tools_json": TOOLS, "scenarios": "a\nb", "mock_results": "c"},
            "has 1 lines, and inputs.scenarios 2",
        ),
        ({"tools_json": "{", "scenarios": "a", "mock_results": "b"}, "inputs.tools_json is not JSON"),
        ({"tools_json": "[]", "scenarios": "a", "mock_results": "b"}, "names no tool"),
        ({"tools_json": '[{"x": 1}]', "scenarios": "a", "mock_results": "b"}, "has no name in tool 0"),
    ],
)
def test_dataset_tools_that_cannot_be_are_refused(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        made("tool_use_traces", inputs)


def test_a_dataset_of_passages_has_only_what_they_answer() -> None:
    documents = f"{'a' * 30}\n\n{'b' * 30}\n\n{'c' * 50}\n\nshort"

    def say(messages: list[Message]) -> str:
        if "different questions" in last(messages):
            return "1. What?\n2. Who?\n3. Never asked?"
        return "NOT IN THE PASSAGE." if "Who?" in last(messages) else "That."

    found, dropped, model = made("rag_qa", {"documents": documents, "min_chunk_chars": 40}, say)
    passages = [f"{'a' * 30}\n\n{'b' * 30}", "c" * 50]
    assert [row["messages"][0]["content"] for row in rows_of(found)] == [f"{p}\n\nWhat?" for p in passages]
    assert drops_of(found) == [
        (f"line {line}", "the passage does not answer the question") for line in (1, 5)
    ]
    assert [(drop.where, drop.reason) for drop in dropped] == [
        ("line 7", "is shorter than min_chunk_chars 40")
    ]
    assert len(model.asked) == 6


@pytest.mark.parametrize(
    "answer",
    [
        Answer("<think>\nBecause.\n</think>\nSo."),
        Answer("<thinking>Because.</thinking> So."),
        Answer("Because.</think>\n\nSo."),
        Answer("So.", thinking="Because."),
        Answer("Because.\n\n**Answer:** So."),
        Answer("Because.\n### Final answer: So."),
        Answer("Because.\n\nSo."),
    ],
)
def test_dataset_thinking_is_told_from_the_answer_however_it_is_written(answer: Answer) -> None:
    assert parted(answer) == ("Because.", "So.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("So.", "thinking and answer cannot be told apart"),
        ("<think>Because.</think>", "the answer is empty"),
        ("<think> </think>So.", "the thinking is empty"),
    ],
)
def test_dataset_thinking_without_an_answer_is_dropped(text: str, reason: str) -> None:
    with pytest.raises(Dropped, match=reason):
        parted(Answer(text))


def test_a_dataset_of_thoughts_has_them_in_one_shape() -> None:
    found, _, _ = made(
        "cot_synthesis", {"questions": "Why?", "category": "physics"}, lambda messages: "Because.\n\nSo."
    )
    [row] = rows_of(found)
    assert row["messages"][1]["content"] == "<think>\nBecause.\n</think>\n\nSo."
    assert row["metadata"] == {"category": "physics"}


def test_dataset_seeds_differ_from_call_to_call_and_come_again() -> None:
    def seeds(seed: int) -> list[int]:
        inputs = {"seeds": "a\nb", "turns": 4}
        return made("multi_turn_chat", inputs, lambda messages: "x", seed=seed)[2].seeds

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 12
