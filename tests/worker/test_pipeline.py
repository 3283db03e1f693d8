"""Requests through the whole worker in one process, on a tiny real model: text, stops, seeds, resume, limits."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import (
    ChatPrompt,
    Failed,
    Prefill,
    Reasoning,
    Sampling,
    Started,
    Text,
    TextPrompt,
    TokenPrompt,
)
from tests.oracles.checkpoints import reference, write_case
from tests.worker.asking import GREEDY, WARM, ask, finish, ids, request, run, served, text
from worker.engine.engine import Output
from worker.stream import Stream

CASE = "llama_tied"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case(CASE, tmp_path_factory.mktemp("pipeline") / "model")


def test_oracle_greedy_ids_come_out_of_the_whole_worker(model_dir):
    async def body() -> None:
        expected = reference(CASE)
        async with served(model_dir) as pipeline:
            prompt = TokenPrompt(expected["input_ids"].tolist())
            events = await ask(pipeline, request(prompt=prompt, max_tokens=len(expected["greedy_ids"])))
            greedy = expected["greedy_ids"].tolist()
            if 2 in greedy:  # eos
                greedy = greedy[: greedy.index(2)]
            assert ids(events) == greedy

    run(body)


def test_events_come_in_order_and_the_usage_adds_up(model_dir):
    async def body() -> None:
        async with served(model_dir, prefill_chunk=4) as pipeline:
            events = await ask(pipeline, request())
            assert isinstance(events[0], Started)
            prefills = [e for e in events if isinstance(e, Prefill)]
            assert [p.done for p in prefills] == sorted(p.done for p in prefills)
            assert prefills[-1].done == prefills[-1].total == events[0].prompt_tokens
            usage = finish(events).usage
            assert usage.prompt_tokens == events[0].prompt_tokens
            assert usage.completion_tokens == len(ids(events)) + (finish(events).reason == "stop")
            assert usage.cached_tokens == 0

    run(body)


def test_the_same_seed_gives_the_same_text_and_another_one_another(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            first = text(await ask(pipeline, request(sampling=WARM, seed=1)))
            assert text(await ask(pipeline, request(sampling=WARM, seed=1))) == first
            assert text(await ask(pipeline, request(sampling=WARM, seed=2))) != first

    run(body)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_request_resumed_after_any_token_ends_with_the_same_text(model_dir, sampling):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            whole = await ask(pipeline, request(sampling=sampling))
            so_far = ids(whole)
            for cut in range(len(so_far) + 1):
                events = await ask(pipeline, request(f"r{cut}", sampling=sampling, resume=so_far[:cut]))
                assert [isinstance(event, Started) for event in events] == [True] + [False] * (
                    len(events) - 1
                )
                assert ids(events) == so_far[cut:]
                kept = pipeline.context.detokenizers.new()
                said = "".join(kept.feed(i) for i in so_far[:cut])
                assert said + text(events) == text(whole)
                assert finish(events).usage.completion_tokens == finish(whole).usage.completion_tokens
                assert finish(events).reason == finish(whole).reason

    run(body)


def test_an_id_that_is_used_again_at_once_hears_nothing_of_the_row_that_had_it(model_dir):
    """A stop string ends an answer before its row, whose last words come when the next answer has begun."""

    async def body() -> None:
        async with served(model_dir) as pipeline:
            whole = await ask(pipeline, request(max_tokens=40))
            stop = text(whole)[4:6]
            for _ in range(5):
                stopped = await ask(pipeline, request(max_tokens=40, stop=[stop]))
                assert finish(stopped).stop_sequence == stop
                again = await ask(pipeline, request(max_tokens=40))
                assert (text(again), finish(again).reason) == (text(whole), finish(whole).reason)

    run(body)


def test_a_row_of_another_request_with_the_same_id_is_not_listened_to(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            stream = await pipeline.prepare(request("r"))
            with pipeline.holding("r", stream):
                pipeline.dispatch([Output("r", stream.serial - 1, finish="cancelled")])
                assert not stream.is_done
                pipeline.dispatch([Output("r", stream.serial, finish="cancelled")])
                assert finish(stream.take()).reason == "cancelled"

    run(body)


def test_of_two_requests_with_one_id_that_come_together_one_is_refused(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            expected = text(await ask(pipeline, request("alone")))
            stream, other = [await pipeline.prepare(request("r")) for _ in range(2)]
            async with aclosing(pipeline.run(stream)) as batches:
                events = [*await anext(batches)]
                with pytest.raises(Refused, match="'r' is in flight already"):
                    await anext(pipeline.run(other))
                events += [event async for batch in batches for event in batch]
            assert text(events) == expected
            assert pipeline.num_streams == 0

    run(body)


def test_rows_together_say_what_each_says_alone(model_dir):
    async def body() -> None:
        prompts = ["a", "the hat and the cat " * 6, "in the end", "other than that, then, and there " * 3]
        async with served(model_dir, prefix_cache_bytes=0, prefill_chunk=16) as pipeline:
            asked = [
                request(f"r{n}", prompt=TextPrompt(p), seed=n, sampling=WARM if n % 2 else GREEDY)
                for n, p in enumerate(prompts)
            ]
            alone = [text(await ask(pipeline, one)) for one in asked]
            together = await asyncio.gather(*(ask(pipeline, one) for one in asked))
            assert [text(events) for events in together] == alone

    run(body)


def test_a_repeated_prompt_comes_from_the_cache_with_the_same_text(model_dir):
    async def body() -> None:
        prompt = TextPrompt("the cat and the hat and the bat " * 4)
        async with served(model_dir) as pipeline:
            cold = await ask(pipeline, request("cold", prompt=prompt))
            warm = await ask(pipeline, request("warm", prompt=prompt))
            assert text(warm) == text(cold)
            usage = finish(warm).usage
            assert usage.cached_tokens == usage.prompt_tokens - 1

    run(body)


def test_a_stop_string_ends_the_answer_wherever_its_tokens_are_cut(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            whole = text(await ask(pipeline, request(max_tokens=40)))
            assert len(whole) > 12
            for at in range(2, len(whole) - 6, 3):
                stop = whole[at : at + 4]
                events = await ask(pipeline, request(f"r{at}", max_tokens=40, stop=[stop]))
                assert text(events) == whole[: whole.index(stop)]
                assert finish(events).reason == "stop"
                assert finish(events).stop_sequence == stop
            begun = whole[-3:] + "never"
            events = await ask(pipeline, request("begun", max_tokens=40, stop=[begun]))
            assert text(events) == whole
            assert finish(events).stop_sequence is None

    run(body)


def test_any_eos_id_of_the_three_sources_ends_the_answer(model_dir, tmp_path):
    """config.json, generation_config.json and the tokenizer each name ids; all of them end a turn."""

    async def body() -> None:
        async with served(model_dir) as pipeline:
            free = ids(await ask(pipeline, request(max_tokens=12)))
        import json

        other = write_case(CASE, tmp_path / "eos")
        marker = free[4]
        (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, marker]}))
        async with served(other) as pipeline:
            assert {2, marker} <= pipeline.context.eos
            events = await ask(pipeline, request(max_tokens=12))
            assert ids(events) == free[: free.index(marker)]
            assert finish(events).reason == "stop"

    run(body)


def test_max_tokens_is_clamped_to_the_context(model_dir):
    async def body() -> None:
        async with served(model_dir, max_context=40) as pipeline:
            events = await ask(pipeline, request(max_tokens=10_000))
            assert finish(events).reason in ("length", "stop")
            usage = finish(events).usage
            assert usage.prompt_tokens + usage.completion_tokens <= 40

    run(body)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        (
            TextPrompt("the " * 80),
            ErrorCode.CONTEXT_EXCEEDED,
            r"prompt has \d+ tokens .* context is 40 tokens",
        ),
        (
            TextPrompt("the " * 100_000),
            ErrorCode.CONTEXT_EXCEEDED,
            "400000 characters, .* context is 40 tokens",
        ),
        (TokenPrompt([1] * 41), ErrorCode.CONTEXT_EXCEEDED, "41 tokens"),
        (TextPrompt(""), ErrorCode.INVALID_REQUEST, "no tokens"),
        (TokenPrompt([1, 272]), ErrorCode.INVALID_REQUEST, "token id 272 is outside the vocabulary of 272"),
        (TokenPrompt([-1]), ErrorCode.INVALID_REQUEST, "token id -1"),
        (
            ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]),
            ErrorCode.TEMPLATE_FAILED,
            "template",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(model_dir, prompt, code, words):
    async def body() -> None:
        async with served(model_dir, max_context=40) as pipeline:
            with pytest.raises(Refused, match=words) as caught:
                await pipeline.prepare(request(prompt=prompt))
            assert caught.value.failure.code is code
            assert pipeline.num_streams == 0

    run(body)


def test_a_reader_that_leaves_cancels_its_row_and_the_others_go_on(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            alone = text(await ask(pipeline, request("alone")))
            stream = await pipeline.prepare(request("leaver", max_tokens=400, seed=3, sampling=WARM))
            other = asyncio.create_task(ask(pipeline, request("stayer")))
            async with aclosing(pipeline.run(stream)) as batches:
                async for batch in batches:
                    if any(isinstance(event, Text) for event in batch):
                        break
            assert text(await other) == alone
            await asyncio.wait_for(pipeline.drained(), 10)
            with pytest.raises(Refused) as caught:
                await pipeline.prepare(request("late"))
            assert caught.value.failure.code is ErrorCode.SHUTTING_DOWN

    run(body)


def test_a_slow_template_holds_up_nobody_else(model_dir, tmp_path):
    async def body() -> None:
        folder = write_case(CASE, tmp_path / "slow")
        loop = "{% for a in range(2000) %}{% for b in range(500) %}{% endfor %}{% endfor %}"
        template = loop + (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(template)
        async with served(folder) as pipeline:
            chat = ChatPrompt([{"role": "user", "content": "the cat"}])
            slow = asyncio.create_task(ask(pipeline, request("slow", prompt=chat)))
            await asyncio.sleep(0)
            quick = await ask(pipeline, request("quick", max_tokens=3))
            assert text(quick)
            assert not slow.done()
            assert text(await slow)

    run(body)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1e-300), Sampling(temperature=1e-45), Sampling(temperature=1.0, top_p=1e-300)],
)
def test_sampling_values_at_the_edge_of_float_mean_the_likeliest_token(model_dir, sampling):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            greedy = text(await ask(pipeline, request("greedy")))
            assert text(await ask(pipeline, request("edge", sampling=sampling))) == greedy
            tiny = Sampling(temperature=1.0, min_p=1e-300)
            assert text(await ask(pipeline, request("min_p", sampling=tiny)))

    run(body)


def test_thinking_is_split_off_when_the_template_opens_it(model_dir, tmp_path):
    async def body() -> None:
        folder = write_case(CASE, tmp_path / "think")
        template = (folder / "chat_template.jinja").read_text() + "{{ '<think>' }}"
        (folder / "chat_template.jinja").write_text(template)
        prompt = ChatPrompt([{"role": "user", "content": "the cat"}])
        async with served(folder) as pipeline:
            assert pipeline.context.facts.reasoning
            events = await ask(pipeline, request(prompt=prompt))
            usage = finish(events).usage
            assert text(events) == ""
            assert text(events, Reasoning)
            assert usage.reasoning_tokens == usage.completion_tokens
            raw = await ask(pipeline, request("raw", prompt=prompt, split_reasoning=False))
            assert text(raw).lstrip("\r\n") == text(events, Reasoning)

    run(body)


def test_an_answer_that_cannot_be_read_fails_alone(model_dir, monkeypatch):
    """A bug in what reads one answer takes nothing from those beside it."""

    async def body() -> None:
        async with served(model_dir) as pipeline:
            alone = await ask(pipeline, request("alone", sampling=WARM))
            feed = Stream.feed

            def broken(stream: Stream, output: Output) -> bool:
                if stream.sequence.id == "bad" and stream._num_completion == 3:
                    raise ZeroDivisionError
                return feed(stream, output)

            monkeypatch.setattr(Stream, "feed", broken)
            bad, *good = await asyncio.gather(
                ask(pipeline, request("bad")),
                *(ask(pipeline, request(f"good{n}", sampling=WARM)) for n in range(3)),
            )
            assert isinstance(bad[-1], Failed)
            assert bad[-1].failure.code is ErrorCode.INTERNAL
            assert "ZeroDivisionError" in bad[-1].failure.message
            assert [text(events) for events in good] == [text(alone)] * 3
            assert pipeline.num_streams == 0

    run(body)
