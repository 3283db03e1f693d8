"""Log-probabilities on their way out: one a token, with the likeliest beside it, also across a resume."""

from pathlib import Path

import numpy as np
import pytest

from shared import ndjson
from shared.errors import ErrorCode, Refused
from shared.wire import ChatPrompt, Event, Logprob, Reasoning, Sampling, Text, TokenPrompt
from tests.oracles.checkpoints import reference, write_case
from tests.worker.asking import GREEDY, WARM, ask, ids, request, run, served, text

CASE = "llama_tied"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case(CASE, tmp_path_factory.mktemp("logprobs") / "model")


def logprobs(events: list[Event]) -> list[Logprob]:
    return [one for event in events if isinstance(event, Text | Reasoning) for one in event.logprobs]


def test_oracle_the_first_logprobs_are_those_of_the_reference_logits(model_dir):
    async def body() -> None:
        expected = reference(CASE)
        logits = np.array(expected["logits"]).reshape(-1, np.array(expected["logits"]).shape[-1])[-1]
        truth = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        async with served(model_dir) as pipeline:
            prompt = TokenPrompt(expected["input_ids"].tolist())
            events = await ask(pipeline, request(prompt=prompt, max_tokens=1, logprobs=20))
            [first] = logprobs(events)
            assert [one.id for one in first.top] == np.argsort(-truth)[:20].tolist()
            np.testing.assert_allclose(
                [one.logprob for one in first.top], np.sort(truth)[::-1][:20], atol=1e-3
            )
            assert (first.id, first.logprob, first.bytes) == (
                first.top[0].id,
                first.top[0].logprob,
                first.top[0].bytes,
            )

    run(body)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_token_has_its_own_and_the_likeliest(model_dir, sampling, count):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            plain = await ask(pipeline, request(sampling=sampling))
            events = await ask(pipeline, request("told", sampling=sampling, logprobs=count))
            assert ids(events) == ids(plain)
            assert not logprobs(plain)
            told = logprobs(events)
            assert [one.id for one in told] == ids(events)
            core = pipeline.context.tokenizer.core
            for one in told:
                assert len(one.top) == count
                assert [other.logprob for other in one.top] == sorted(
                    (o.logprob for o in one.top), reverse=True
                )
                assert one.logprob <= 1e-6
                for other in [one, *one.top]:
                    spelled = core.decode([other.id], skip_special_tokens=False)
                    assert "�" in spelled or other.bytes.decode() == spelled
                if sampling is GREEDY and count:
                    assert one.top[0].id == one.id
            for event in events:
                if isinstance(event, Text | Reasoning):
                    assert len(event.logprobs) == len(event.ids)
            assert [ndjson.encode(event) for event in plain if isinstance(event, Text)]

    run(body)


def test_what_has_been_delivered_is_not_delivered_again_after_a_resume(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            whole = logprobs(await ask(pipeline, request(sampling=WARM, logprobs=3)))
            for cut in range(len(whole) + 1):
                resume = [one.id for one in whole[:cut]]
                rest = logprobs(
                    await ask(pipeline, request(f"r{cut}", sampling=WARM, logprobs=3, resume=resume))
                )
                assert [one.id for one in rest] == [one.id for one in whole[cut:]]
                for mine, other in zip(rest, whole[cut:], strict=True):
                    assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
                    assert [one.id for one in mine.top] == [one.id for one in other.top]

    run(body)


def test_thoughts_and_answer_each_carry_their_own_tokens(model_dir, tmp_path):
    """A close mark in the middle: the ids before it leave with the thoughts, also when all leaves at once."""

    async def body() -> None:
        folder = write_case(CASE, tmp_path / "think")
        template = (folder / "chat_template.jinja").read_text() + "{{ '<think>' }}"
        (folder / "chat_template.jinja").write_text(template)
        async with served(folder) as pipeline:
            prompt = ChatPrompt([{"role": "user", "content": "the cat"}])
            stream = await pipeline.prepare(request(prompt=prompt, logprobs=0))
            pieces = [("reasoning", "ab", 2), ("reasoning", "c", 3), ("text", "x", 6)]
            stream._ids = [11, 12, 13, 14, 15, 16]
            stream._logprobs = [Logprob(i, -1.0, b"") for i in stream._ids]
            kept = list(stream._ids)
            stream._pieces = pieces
            first, second = stream.take()
            assert (type(first), first.text, first.ids) == (Reasoning, "abc", kept[:3])
            assert (type(second), second.text, second.ids) == (Text, "x", kept[3:])
            assert [one.id for one in first.logprobs] == first.ids
            stream._ids = kept[:2]
            stream._logprobs = [Logprob(i, -1.0, b"") for i in stream._ids]
            stream._pieces = [
                ("reasoning", "a", 2),
                ("text", "b", 2),
            ]  # one token ended the one and began the other
            first, second = stream.take()
            assert (first.ids, second.ids) == ([], kept[:2])

    run(body)


@pytest.mark.parametrize("asked", [-1, 21])
def test_more_than_twenty_are_refused(model_dir, asked):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            with pytest.raises(Refused, match=r"top_logprobs is .* from 0 to 20") as caught:
                await pipeline.prepare(request(logprobs=asked))
            assert caught.value.failure.code is ErrorCode.INVALID_REQUEST
            assert caught.value.failure.param == "top_logprobs"

    run(body)


def test_logprobs_are_those_of_the_biased_distribution(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            sampling = Sampling(temperature=0, logit_bias={77: 100.0})
            [first, *_] = logprobs(await ask(pipeline, request(sampling=sampling, logprobs=1, max_tokens=2)))
            assert (first.id, round(first.logprob, 4)) == (77, 0)

    run(body)


def test_tokens_without_text_are_told_too_at_the_end(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            silent = next(
                i for i in sorted(pipeline.context.tokenizer.special_ids) if i not in pipeline.context.eos
            )
            sampling = Sampling(temperature=0, logit_bias={silent: 100.0})
            events = await ask(pipeline, request(sampling=sampling, logprobs=0, max_tokens=5))
            assert ids(events) == [silent] * 5
            assert [one.id for one in logprobs(events)] == [silent] * 5
            assert text(events) == ""

    run(body)
