"""Answers held to a grammar through the whole worker: alone, together, resumed, behind thoughts, refused."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import (
    ChatPrompt,
    Choice,
    ContextFree,
    Finish,
    JsonObject,
    JsonSchema,
    Reasoning,
    Regex,
    Sampling,
    Text,
    TextPrompt,
)
from tests.oracles.checkpoints import write_case
from tests.worker.asking import GREEDY, WARM, ask, finish, ids, request, run, served, text

CASE = "llama_tied"
SHORT = Regex("[a-f]{3,9}!")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case(CASE, tmp_path_factory.mktemp("structured") / "model")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> Path:
    """Its template opens a think block, and the marks are text to its tokenizer, as in Qwen3's."""
    folder = write_case(CASE, tmp_path_factory.mktemp("structured") / "thinker")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if think %}{{ '<think>' }}{% endif %}{# <think> #}")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A small schema of some shape; its values are bounded, so that a model without sense comes to an end."""
    kind = rng.choice(
        ["integer", "boolean", "enum", "string", "null", *(["array", "object"] * 2 if depth else [])]
    )
    if kind == "enum":
        return {"enum": rng.sample(["yes", "no", 1, 2.5, None, "two words"], 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 300)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 6)}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": 1, "maxItems": 2}
    if kind == "object":
        names = rng.sample(["a", "name", "東京", "x y"], rng.randint(1, 2))
        properties = {name: schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": kind}


def fits(value: Any, wanted: dict[str, Any]) -> bool:
    """The few keywords of `schema`, checked by hand."""
    if "enum" in wanted:
        return value in wanted["enum"]
    kind = wanted["type"]
    if kind == "object":
        return set(value) == set(wanted["properties"]) and all(
            fits(value[name], inner) for name, inner in wanted["properties"].items()
        )
    if kind == "array":
        return 1 <= len(value) <= 2 and all(fits(item, wanted["items"]) for item in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= wanted["maxLength"]
    if kind == "integer":
        return type(value) is int and wanted["minimum"] <= value <= wanted["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


def test_a_model_without_sense_writes_json_of_any_schema_alone_and_together(model_dir):
    async def body() -> None:
        rng = random.Random(7)
        asked = [
            request(
                f"r{n}",
                grammar=JsonSchema(schema(rng)),
                max_tokens=300,
                seed=n,
                sampling=WARM if n % 3 else Sampling(temperature=0, frequency_penalty=0.5),
            )
            for n in range(60)
        ]
        async with served(model_dir, prefix_cache_bytes=0, max_rows=8) as pipeline:
            together = await asyncio.gather(*(ask(pipeline, one) for one in asked))
            ended = 0
            for one, events in zip(asked, together, strict=True):
                if finish(events).reason == "stop":
                    ended += 1
                    assert fits(json.loads(text(events)), one.grammar.schema), (one.grammar, text(events))
            assert ended > 50  # the others stay in white space up to their length
            for one, events in list(zip(asked, together, strict=True))[::6]:
                alone = await ask(pipeline, one)
                assert ids(alone) == ids(events)
                assert text(alone) == text(events)

    run(body)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        (SHORT, r"[a-f]{3,9}!"),
        (Regex(r"\d{2}/\d{2}"), r"\d{2}/\d{2}"),
        (Choice(["yes", 'say "no"', "東京\n"]), 'yes|say "no"|東京\n'),
        (
            ContextFree('start: "<" WORD ("," WORD)~1..2 ">"\nWORD: /[a-c]{1,3}/'),
            "<[a-c]{1,3}(,[a-c]{1,3}){1,2}>",
        ),
        (ContextFree('root ::= "x" [0-9] ("y" | "z")'), "x[0-9][yz]"),
    ],
)
def test_the_whole_answer_is_a_sentence_and_ends_where_it_is_complete(model_dir, grammar, form, sampling):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            events = await ask(pipeline, request(grammar=grammar, sampling=sampling, max_tokens=60))
            assert re.fullmatch(form, text(events))
            assert finish(events).reason == "stop"
            assert finish(events).usage.completion_tokens == len(ids(events))  # no eos was needed

    run(body)


def test_where_the_sentence_may_end_or_go_on_an_eos_ends_it(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            for eos in sorted(pipeline.context.eos):
                likely = Sampling(temperature=0, logit_bias={eos: 100.0})
                events = await ask(pipeline, request(f"r{eos}", grammar=Regex("[a-f]{3,}"), sampling=likely))
                assert re.fullmatch("[a-f]{3,}", text(events))
                assert finish(events).reason == "stop"
                assert finish(events).usage.completion_tokens == len(ids(events)) + 1

    run(body)


def test_a_json_object_is_one_or_the_beginning_of_one(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            for seed in range(6):
                events = await ask(
                    pipeline,
                    request(f"r{seed}", grammar=JsonObject(), seed=seed, sampling=WARM, max_tokens=80),
                )
                assert text(events).startswith("{")
                if finish(events).reason == "stop":
                    assert isinstance(json.loads(text(events)), dict)

    run(body)


def test_a_grammar_that_never_ends_comes_to_its_length(model_dir):
    async def body() -> None:
        async with served(model_dir, max_context=200) as pipeline:
            with pytest.raises(Refused, match="no text fits it"):
                await pipeline.prepare(request("none", grammar=ContextFree('start: start "a"')))
            events = await ask(
                pipeline, request(grammar=ContextFree('start: ("a" | "b") start'), max_tokens=50)
            )
            assert set(text(events)) <= {"a", "b"}
            assert finish(events).reason == "length"
            assert finish(events).usage.completion_tokens == 50
            events = await ask(pipeline, request("full", grammar=Regex("[a-d]{10000}"), max_tokens=None))
            usage = finish(events).usage
            assert usage.prompt_tokens + usage.completion_tokens == 200

    run(body)


def test_rows_with_and_without_a_grammar_say_what_each_says_alone(model_dir):
    async def body() -> None:
        asked = [
            request("g1", grammar=SHORT, sampling=WARM),
            request("f1", sampling=WARM, seed=5, max_tokens=40),
            request("g2", grammar=JsonSchema({"type": "integer"}), sampling=GREEDY, max_tokens=12),
            request("f2", prompt=TextPrompt("in the end " * 9), sampling=GREEDY, max_tokens=40),
        ]
        async with served(model_dir, prefix_cache_bytes=0, prefill_chunk=8) as pipeline:
            alone = [await ask(pipeline, one) for one in asked]
            together = await asyncio.gather(*(ask(pipeline, one) for one in asked))
            for mine, other in zip(together, alone, strict=True):
                assert ids(mine) == ids(other)
                assert finish(mine).reason == finish(other).reason

    run(body)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_resumed_answer_goes_on_in_its_grammar(model_dir, sampling):
    async def body() -> None:
        more = {"grammar": SHORT, "sampling": sampling}
        async with served(model_dir) as pipeline:
            whole = await ask(pipeline, request(**more))
            so_far = ids(whole)
            for cut in range(len(so_far) + 1):
                events = await ask(pipeline, request(f"r{cut}", resume=so_far[:cut], **more))
                assert ids(events) == so_far[cut:]
                assert text(whole).endswith(text(events))
                assert finish(events).reason == finish(whole).reason == "stop"
                usage = finish(events).usage
                assert usage.completion_tokens == finish(whole).usage.completion_tokens
            with pytest.raises(Refused, match="do not fit the grammar") as caught:
                await pipeline.prepare(request("other", resume=[so_far[0], 9], **more))
            assert caught.value.failure.param == "resume"

    run(body)


def test_the_grammar_begins_after_the_thoughts(thinker):
    async def body() -> None:
        async with served(thinker) as pipeline:
            core = pipeline.context.tokenizer.core
            begin, close = core.token_to_id("<think>"), core.token_to_id("</think>")
            line = core.encode("\n", add_special_tokens=False).ids[0]
            opened = ChatPrompt([{"role": "user", "content": "the cat"}], {"think": True})
            maybe = ChatPrompt(opened.messages)

            async def answer(name, prompt, bias, **more):
                sampling = Sampling(temperature=0, logit_bias=bias)
                asked = request(name, prompt=prompt, grammar=SHORT, sampling=sampling, **more)
                return await ask(pipeline, asked)

            events = await answer("opened", opened, {close: 90.0, line: 100.0}, max_tokens=60)
            assert finish(events).reason == "length"  # it thinks of line breaks only: no grammar holds it up
            events = await answer("closes", opened, {close: 100.0})
            assert re.fullmatch("[a-f]{3,9}!", text(events))
            assert ids(events)[0] == close
            assert finish(events).reason == "stop"
            events = await answer("thinks", maybe, {begin: 100.0, close: 50.0})
            assert ids(events)[:2] == [begin, close]
            assert re.fullmatch("[a-f]{3,9}!", text(events))
            events = await answer("does not", maybe, {close: 100.0})
            assert re.fullmatch("[a-f]{3,9}!", text(events))
            assert not any(isinstance(event, Reasoning) for event in events)

    run(body)


def test_thoughts_are_free_until_they_close_and_resume_inside_them(thinker):
    async def body() -> None:
        prompt = ChatPrompt([{"role": "user", "content": "the cat"}], {"think": True})
        async with served(thinker) as pipeline:
            close = pipeline.context.tokenizer.core.token_to_id("</think>")
            sampling = Sampling(temperature=1.0, logit_bias={close: 2.0})
            for seed in range(20):
                more = {
                    "prompt": prompt,
                    "grammar": SHORT,
                    "sampling": sampling,
                    "seed": seed,
                    "max_tokens": 200,
                }
                whole = await ask(pipeline, request(f"s{seed}", **more))
                said = ids(whole)
                if close in said[4:] and finish(whole).reason == "stop":
                    break
            assert text(whole, Reasoning)
            assert re.fullmatch("[a-f]{3,9}!", text(whole))
            at = said.index(close)
            for cut in (0, 1, at // 2, at, at + 1, at + 2, len(said) - 1, len(said)):
                events = await ask(pipeline, request(f"r{cut}", resume=said[:cut], **more))
                assert ids(events) == said[cut:]
                assert text(whole).endswith(text(events))

    run(body)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Regex("a("), "invalid regex"),
        (Regex(r"(a)\1"), "backreferences are not supported"),
        (Regex("a" * 300_000), "262144 are allowed"),
        (JsonSchema({"type": "string", "not": {"const": "a"}}), r'Unimplemented keys: \["not"\]'),
        (JsonSchema({"$ref": "http://example.com/a"}), "not present in a registry"),
        (JsonSchema(False), "schema is false"),
        (ContextFree("start: foo"), "unknown name"),
        (ContextFree(""), "root"),
        (ContextFree('root ::= "a'), "end of input"),
        (Choice([]), "one option or more"),
        (
            JsonSchema(
                {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]} for i in range(9)]}
            ),
            "too large",
        ),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_before_anything_runs(model_dir, grammar, words):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            with pytest.raises(Refused, match=words) as caught:
                await pipeline.prepare(request(grammar=grammar))
            failure = caught.value.failure
            assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, "grammar")
            assert "\n" not in failure.message
            assert pipeline.num_streams == 0

    run(body)


def test_a_schema_that_blows_up_is_refused_in_bounded_time_and_others_are_served(model_dir, monkeypatch):
    monkeypatch.setattr("worker.pipeline.COMPILE_S", 0.3)

    async def body() -> None:
        huge = JsonSchema(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
        )
        async with served(model_dir) as pipeline:
            asked = asyncio.create_task(pipeline.prepare(request("huge", grammar=huge)))
            await asyncio.sleep(0.05)
            assert text(await ask(pipeline, request("small")))
            with pytest.raises(Refused, match=r"not compiled within 0\.3 s") as caught:
                await asked
            assert caught.value.failure.param == "grammar"

    run(body)


def test_a_grammar_that_grows_too_hard_in_mid_answer_fails_its_row_alone(model_dir, monkeypatch):
    """The work for one mask is bounded; a bound of next to nothing stands for a grammar that is really hard."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(
        "worker.engine.grammar._LIMITS", LLParserLimits(step_max_items=60, verbose_errors=False)
    )

    async def body() -> None:
        async with served(model_dir) as pipeline:
            hard = ContextFree('start: a\na: a a | "e" | "t" | "a" | "b"')
            onward = Sampling(temperature=0, logit_bias=dict.fromkeys(pipeline.context.eos, -100.0))
            asked = [
                request("hard", grammar=hard, max_tokens=200, sampling=onward),
                request("free", max_tokens=40),
            ]
            alone = await ask(pipeline, asked[1])
            failed, other = await asyncio.gather(*(ask(pipeline, one) for one in asked))
            assert ids(other) == ids(alone)
            failure = failed[-1].failure
            assert failure.code is ErrorCode.INVALID_REQUEST
            assert failure.message.startswith("request hard: its grammar cannot be matched any further")
            assert not any(isinstance(event, Finish) for event in failed)
            assert any(isinstance(event, Text) for event in failed)

    run(body)
