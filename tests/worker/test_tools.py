"""Calls of tools through a whole worker: a model without sense calls as it is told to, and what it does is told right.

Its marks are tokens outside of text in some formats and text in others, as in the real families.
"""

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import (
    ChatPrompt,
    JsonSchema,
    Reasoning,
    Regex,
    Sampling,
    Text,
    TextPrompt,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.worker.asking import GREEDY, ask, calls, finish, ids, request, run, served, text
from tests.worker.callers import NOW, SHOWS, WEATHER, caller, chat, fits

ONE = ToolChoice("required", parallel=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model for a format, made when it is first asked for."""
    made: dict[str, Path] = {}

    def model(name: str, **how: str) -> Path:
        key = f"{name} {how}"
        if key not in made:
            made[key] = caller(tmp_path_factory.mktemp("tools") / "model", name, **how)
        return made[key]

    return model


def likely(pipeline, *marks: str, by: float = 100.0, temperature: float = 1.0) -> Sampling:
    """Sampling in which tokens come early: marks, or the end of the answer."""
    core = pipeline.context.tokenizer.core
    tokens = {core.token_to_id(mark): by for mark in marks if mark}
    assert None not in tokens
    return Sampling(temperature=temperature, logit_bias=tokens)


async def answer(pipeline, name: str, seed: int = 0, **more):
    """In harmony thoughts end soon, so that something comes after them."""
    marks = ["<|end|>"] if name == "harmony" else []
    given = {"sampling": likely(pipeline, *marks, by=4.0), "max_tokens": 400, "seed": seed, **more}
    return await ask(pipeline, request(f"{name}{seed}", **given))


@pytest.mark.parametrize("name", SHOWS)
def test_tools_a_required_call_is_valid_whatever_the_weights(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            assert pipeline.context.facts.tools == name
            given = {"prompt": chat(WEATHER, NOW), "tool_choice": ONE}
            for events in await asyncio.gather(*(answer(pipeline, name, seed, **given) for seed in range(5))):
                [(called, arguments)] = calls(events)
                assert fits(called, arguments)
                assert text(events) == ""
                assert finish(events).reason == "tool_calls"
            named = ToolChoice("required", "now")
            greedy = likely(
                pipeline, *(["<|end|>"] if name == "harmony" else ["<|im_end|>"]), by=90.0, temperature=0
            )
            events = await answer(
                pipeline, name, 9, prompt=chat(WEATHER, NOW), tool_choice=named, sampling=greedy
            )
            assert set(calls(events)) == {("now", "{}")}

    run(body)


@pytest.mark.parametrize(
    "name", ["json_tags", "function_tags", "gemma", "mistral", "lfm2", "deepseek", "llama_json"]
)
def test_tools_several_calls_follow_each_other_where_that_is_wanted(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            several = set()
            for seed in range(6):
                sampling = likely(pipeline, "<|tool_call>" if name == "gemma" else "<|im_end|>", by=0.5)
                events = await answer(
                    pipeline,
                    name,
                    seed,
                    prompt=chat(NOW),
                    tool_choice=ToolChoice("required"),
                    sampling=sampling,
                )
                found = calls(events)
                assert set(found[:-1]) <= {("now", "{}")}
                assert len({event.id for event in events if isinstance(event, ToolCall)} - {""}) == len(found)
                if finish(events).reason != "length":
                    assert found[-1] == ("now", "{}")
                    assert finish(events).reason == "tool_calls"
                several.add(len(found))
            assert max(several) > 1

    run(body)


@pytest.mark.parametrize("name", sorted(SHOWS.keys() - {"harmony"}))
def test_tools_a_strict_call_is_held_to_its_schema_and_text_is_free(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            form = pipeline.context.calls
            strict = Tool(WEATHER.name, "", WEATHER.parameters, strict=True)
            is_token = pipeline.context.tokenizer.core.token_to_id(form.lead) is not None
            called = 0
            sampling = likely(pipeline, form.lead if is_token else "<|im_end|>", by=3.0)
            given = {"prompt": chat(strict, NOW), "sampling": sampling}
            choices = [ToolChoice(parallel=seed % 2 == 0) for seed in range(6)]
            answers = await asyncio.gather(
                *(
                    answer(pipeline, name, seed, tool_choice=choice, **given)
                    for seed, choice in enumerate(choices)
                )
            )
            for choice, events in zip(choices, answers, strict=True):
                found = calls(events)
                whole = found if finish(events).reason != "length" else found[:-1]
                assert all(fits(*one) for one in whole)
                assert len(found) <= 1 or choice.parallel
                called += len(found)
            assert called or not is_token

    run(body)


@pytest.mark.parametrize("name", ["json_tags", "gemma", "function_tags", "llama_json"])
def test_tools_beside_a_grammar_the_answer_is_either(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            form = pipeline.context.calls
            kinds = set()
            for seed in range(12):
                grammar = Regex("[a-f]{3,9}!") if seed % 2 else JsonSchema({"type": "integer", "maximum": 99})
                lead = form.lead if pipeline.context.tokenizer.core.token_to_id(form.lead) else ""
                sampling = likely(pipeline, lead, by=3.0)
                events = await answer(
                    pipeline, name, seed, prompt=chat(WEATHER, NOW), grammar=grammar, sampling=sampling,
                    tool_choice=ToolChoice(parallel=False),
                )  # fmt: skip
                if found := calls(events):
                    assert all(fits(*one) for one in found)
                    assert text(events) == ""
                    kinds.add("call")
                elif finish(events).reason == "stop":
                    said = text(events)
                    assert said[-1:] == "!" if seed % 2 else isinstance(json.loads(said), int)
                    kinds.add("text")
            assert "text" in kinds
            assert "call" in kinds or not lead

    run(body)


@pytest.mark.parametrize("name", SHOWS)
def test_tools_a_request_resumed_at_any_token_gives_the_same_calls(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            tools = chat(WEATHER, NOW)
            more = {"prompt": tools, "tool_choice": ONE}
            if name == "harmony":
                more |= {"thinking_budget": 3}
            sampling = likely(pipeline, *(["<|end|>"] if name == "harmony" else []), by=9.0)
            more |= {"sampling": sampling, "max_tokens": 400, "seed": 3}
            whole = await ask(pipeline, request("whole", **more))
            said = ids(whole)
            assert calls(whole)
            [first] = {event.id for event in whole if isinstance(event, ToolCall)} - {""}
            delivered = 0  # events before this one have left with the ids so far
            content = [event for event in whole if isinstance(event, Text | Reasoning | ToolCall)]
            places = {sum(len(e.ids) for e in content[:count]) for count in range(len(content) + 1)}
            rests = await asyncio.gather(
                *(ask(pipeline, request(f"r{cut}", resume=said[:cut], **more)) for cut in sorted(places))
            )
            for cut, rest in zip(sorted(places), rests, strict=True):
                while delivered < len(content) and sum(len(e.ids) for e in content[: delivered + 1]) <= cut:
                    delivered += 1
                assert ids(rest) == said[cut:]
                before = "".join(e.arguments for e in content[:delivered] if isinstance(e, ToolCall))
                after = [e for e in rest if isinstance(e, ToolCall)]
                assert before + "".join(e.arguments for e in after) == calls(whole)[0][1]
                assert {e.id for e in after} <= {first, ""}
                assert any(e.id for e in [*content[:delivered], *after] if isinstance(e, ToolCall))
                assert finish(rest).reason == finish(whole).reason == "tool_calls"
                assert finish(rest).usage.reasoning_tokens == finish(whole).usage.reasoning_tokens
            other = await ask(pipeline, request("other", **{**more, "seed": 4}))
            assert {event.id for event in other if isinstance(event, ToolCall)} - {""} != {first}

    run(body)


def test_tools_that_are_not_in_the_request_leave_no_marks_in_the_text(models):
    async def body() -> None:
        async with served(models("json_tags")) as pipeline:
            sampling = likely(pipeline, "<tool_call>", temperature=0)
            events = await ask(pipeline, request("none", prompt=chat(), sampling=sampling))
            assert len(ids(events)) == 24
            assert text(events) == ""
            events = await ask(pipeline, request("some", prompt=chat(NOW), sampling=sampling))
            assert text(events) == "<tool_call>" * 24  # they begin nothing
            assert finish(events).reason == "length"

    run(body)


def test_tools_stop_strings_are_not_looked_for_in_calls(models):
    async def body() -> None:
        async with served(models("json_tags")) as pipeline:
            more = {"prompt": chat(WEATHER), "tool_choice": ONE, "stop": ['"', "\n", "e"]}
            events = await answer(pipeline, "json_tags", **more)
            assert fits(*calls(events)[0])
            assert finish(events).stop_sequence is None
            free = await ask(pipeline, request("free", prompt=chat(WEATHER)))
            cut = text(free)[2:4]
            stopped = await ask(pipeline, request("stopped", prompt=chat(WEATHER), stop=[cut]))
            assert text(stopped) == text(free)[: text(free).index(cut)]
            assert (finish(stopped).reason, finish(stopped).stop_sequence) == ("stop", cut)

    run(body)


BAD = Tool("bad", "", {"type": "object", "properties": {"a": {"$ref": "http://example.com/x"}}}, strict=True)


@pytest.mark.parametrize(
    ("name", "tools", "choice", "words", "param"),
    [
        ("json_tags", [], ToolChoice("required"), "no tools", "tool_choice"),
        ("json_tags", [NOW], ToolChoice("required", "then"), "names 'then'", "tool_choice"),
        ("json_tags", [NOW, BAD], ToolChoice("required"), "tool 'bad' cannot be enforced", "tools"),
        (
            "function_tags",
            [Tool("odd", "", {"type": "object", "properties": {"a>b": {}}}, strict=True)],
            ToolChoice("required"),
            "tool 'odd' cannot be enforced: the name",
            "tools",
        ),
        (
            "gemma",
            [Tool("odd", "", {"type": "object", "required": ["a"]}, strict=True)],
            ToolChoice("required"),
            "it requires 'a'",
            "tools",
        ),
    ],
)
def test_tools_a_choice_that_cannot_be_kept_is_refused(models, name, tools, choice, words, param):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            with pytest.raises(Refused, match=words) as caught:
                await pipeline.prepare(request(prompt=chat(*tools), tool_choice=choice))
            failure = caught.value.failure
            assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
            assert "\n" not in failure.message
            assert pipeline.num_streams == 0

    run(body)


LOOSE: list[dict[str, Any]] = [
    {"properties": {"a": {"$ref": "http://example.com/x"}}, "required": ["a"]},
    {"properties": {"a": {"not": {}}}, "required": ["a"]},
    {"properties": {"a>b\n": {"type": "string"}}, "required": ["a>b\n"]},
    {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}},
    {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": [1]}}},
    {"properties": {"a": {"type": "array", "items": 5, "minItems": "x"}}, "required": "a"},
    {"properties": "x", "required": [5], "$defs": 5},
    {"properties": {"a": {"type": 5, "enum": "x", "anyOf": {}}}, "additionalProperties": "x"},
    {"properties": {"a": {"type": ["string", 5], "format": 5}, "b": [1]}, "required": ["zz"]},
    {"properties": {"a": {"type": "number", "minimum": "x"}, "b": {"anyOf": [5]}}},
    {"properties": {"a": {"anyOf": 5}, "b": {"oneOf": {"a": 1}}}},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 2}}},
    {
        "properties": {"a": {"$ref": "#/$defs/x0"}},
        "$defs": {f"x{n}": {"anyOf": [{"$ref": f"#/$defs/x{n + 1}"}] * 2} for n in range(60)},
    },
]


@pytest.mark.parametrize("name", SHOWS)
def test_tools_that_are_not_strict_are_called_whatever_their_schemas_say(models, name):
    async def body() -> None:
        async with served(models(name)) as pipeline:
            for number, schema in enumerate(LOOSE):
                tool = Tool("odd", "", {"type": "object", **schema})
                prompt = chat(tool, NOW)
                stream = await pipeline.prepare(
                    request(f"r{number}", prompt=prompt, tool_choice=ToolChoice("required", "odd"))
                )
                assert stream.sequence.constraint is not None
                with contextlib.suppress(Refused):  # told of the client, and no bug of the server
                    strict = Tool("odd", "", tool.parameters, strict=True)
                    await pipeline.prepare(
                        request(f"s{number}", prompt=chat(strict), tool_choice=ToolChoice("required"))
                    )

    run(body)


def test_tools_are_called_in_tags_where_the_template_has_no_word_of_them(models):
    async def body() -> None:
        async with served(models("")) as pipeline:
            assert pipeline.context.facts.tools == ""
            events = await answer(pipeline, "", prompt=chat(NOW), tool_choice=ONE)
            assert calls(events) == [("now", "{}")]
            assert finish(events).reason == "tool_calls"

    run(body)


def test_tools_a_plain_prompt_cannot_require_a_call(models):
    async def body() -> None:
        async with served(models("json_tags")) as pipeline:
            with pytest.raises(Refused, match="no tools"):
                await pipeline.prepare(request(prompt=TextPrompt("the cat"), tool_choice=ONE))

    run(body)


def test_tools_marks_that_end_a_turn_end_the_answer(models):
    async def body() -> None:
        async with served(models("llama_json")) as pipeline:
            assert pipeline.context.tokenizer.core.token_to_id("<|eom_id|>") is None
            assert pipeline.context.eos == {2}

    run(body)


THINKERS = [
    ("json_tags", "<think>", "</think>"),
    ("gemma", "<|channel>", "<channel|>"),
    ("mistral", "[THINK]", "[/THINK]"),
]


@pytest.mark.parametrize(("name", "begin", "close"), THINKERS)
def test_tools_a_budget_for_thinking_is_kept_to_the_token(models, name, begin, close):
    async def body() -> None:
        async with served(models(name, shows=f"{begin} {close}", opens=begin)) as pipeline:
            core = pipeline.context.tokenizer.core
            end, start, word = (core.token_to_id(text) for text in (close, begin, "the"))
            shapes = [
                {},
                {"grammar": Regex("[a-f]{3,9}!")},
                {"prompt": chat(WEATHER, think=True), "tool_choice": ONE},
            ]
            for number, shape in enumerate(shapes):
                for budget in (0, 1, 5):
                    more = {"prompt": chat(think=True), "max_tokens": 300, **shape}
                    biases = {start: -100.0, end: -100.0, word: 60.0 if shape else 0.0}
                    more |= {"thinking_budget": budget, "sampling": Sampling(logit_bias=biases)}
                    events = await ask(pipeline, request(f"{number}{budget}", **more))
                    said = ids(events)
                    assert said.index(end) == budget
                    assert finish(events).usage.reasoning_tokens == budget + 1
                    cuts = sorted({0, budget, budget + 1, len(said)})
                    asked = [request(f"{number}{budget}{cut}", resume=said[:cut], **more) for cut in cuts]
                    rests = await asyncio.gather(*(ask(pipeline, one) for one in asked))
                    assert [ids(rest) for rest in rests] == [said[cut:] for cut in cuts]
            opens = {"prompt": chat(), "sampling": likely(pipeline, begin, by=90.0), "thinking_budget": 4}
            events = await ask(pipeline, request("opens", **opens))
            said = ids(events)
            assert said[0] == start
            assert said.index(end) == 5
            soon = {"prompt": chat(think=True), "sampling": likely(pipeline, close), "thinking_budget": 9}
            assert ids(await ask(pipeline, request("soon", **soon)))[0] == end

    run(body)


def test_tools_harmony_thinks_within_its_budget_and_answers_or_calls(models):
    async def body() -> None:
        async with served(models("harmony")) as pipeline:
            core = pipeline.context.tokenizer.core
            message, end = core.token_to_id("<|message|>"), core.token_to_id("<|end|>")
            head = core.encode("<|channel|>analysis<|message|>", add_special_tokens=False).ids
            # a budget of none lets it begin a thought, which ends at once
            cold = likely(pipeline, "<|end|>", by=-100.0)
            more = {
                "sampling": cold,
                "thinking_budget": 4,
                "max_tokens": 300,
                "grammar": Regex("[a-f]{3,9}!"),
            }
            wordy = core.encode("commentary", add_special_tokens=False).ids[0]
            told = {"sampling": Sampling(logit_bias={wordy: 60.0, end: -100.0}), "thinking_budget": None}
            for seed in range(5):
                asked = {**more, **told} if seed == 4 else more
                events = await ask(pipeline, request(f"t{seed}", prompt=chat(), seed=seed, **asked))
                said = ids(events)
                if finish(events).reason == "stop":
                    assert re.fullmatch("[a-f]{3,9}!", text(events))
                else:
                    assert text(events) == ""  # what is told aloud before the answer would be text
                if seed == 4:
                    continue
                if said[: len(head)] == head:
                    assert said.index(end) == len(head) + 4
                    assert finish(events).usage.reasoning_tokens == 5
                    assert text(events, Reasoning)
                else:  # the channel's name in other tokens, or no thought
                    assert finish(events).usage.reasoning_tokens in (0, 5)
                assert message in said

    run(body)


def test_tools_without_a_thinking_model_a_budget_is_nothing(models):
    async def body() -> None:
        async with served(models("llama_json")) as pipeline:
            plain = await ask(pipeline, request("plain", prompt=chat()))
            assert ids(await ask(pipeline, request("bound", prompt=chat(), thinking_budget=0))) == ids(plain)

    run(body)


def test_tools_rows_that_call_think_and_talk_do_not_touch_each_other(models):
    async def body() -> None:
        async with served(
            models("json_tags", shows="<think>", opens="<think>"), prefix_cache_bytes=0
        ) as pipeline:
            asked = [
                request(
                    "call",
                    prompt=chat(WEATHER),
                    tool_choice=ONE,
                    max_tokens=200,
                    sampling=Sampling(temperature=1.0),
                ),
                request("think", prompt=chat(think=True), thinking_budget=3, max_tokens=30),
                request("talk", prompt=ChatPrompt(chat().messages), max_tokens=40),
                request("regex", prompt=chat(think=True), thinking_budget=2, grammar=Regex("[a-f]{3,9}!")),
            ]
            alone = [await ask(pipeline, one) for one in asked]
            together = await asyncio.gather(*(ask(pipeline, one) for one in asked))
            for mine, other in zip(together, alone, strict=True):
                assert ids(mine) == ids(other)
                assert calls(mine) == calls(other)
                assert finish(mine).reason == finish(other).reason

    run(body)


def test_tools_an_echo_has_the_prompt_and_greedy_is_greedy(models):
    async def body() -> None:
        async with served(models("json_tags")) as pipeline:
            events = await ask(
                pipeline, request("echo", prompt=TextPrompt("the cat"), echo=True, sampling=GREEDY)
            )
            assert events[0].prompt == "the cat"

    run(body)
