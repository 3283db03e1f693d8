"""Vectors and scores from a whole worker: encoders in groups, decoders as rows beside those that answer."""

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ErrorCode, Refused
from shared.wire import EmbedRequest, EmbedResult, RankRequest, TextPrompt, TokenPrompt
from tests.oracles import encoders
from tests.oracles.checkpoints import write_case
from tests.worker.asking import ask, finish, request, run, served
from worker.embed.embedder import Embedder
from worker.embed.groups import groups
from worker.layers.batch import solo
from worker.models import load_model
from worker.pipeline import Pipeline

TEXTS = ["the cat and the hat", "a", "東京 é 👩‍👩‍👧", "x" * 100]
PROMPTS = {"prompts": {"query": "find the ", "passage": "in the "}, "default_prompt_name": "passage"}


def embedder(pipeline: Pipeline) -> Embedder:
    return Embedder(pipeline, pipeline._engine)


def asked(*texts: str | list[int], **more: Any) -> EmbedRequest:
    inputs = [TextPrompt(one) if isinstance(one, str) else TokenPrompt(one) for one in texts]
    return EmbedRequest(inputs=inputs, **more)


def vectors(result: EmbedResult) -> np.ndarray[Any, Any]:
    return np.frombuffer(result.vectors, np.float32).reshape(-1, result.dimensions)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_groups_hold_every_text_once_and_no_more_than_they_may(lengths: list[int], most: int) -> None:
    found = groups(lengths, most)
    assert sorted(place for group in found for place in group) == list(range(len(lengths)))
    for group in found:
        longest = max(lengths[place] for place in group)
        assert len(group) == 1 or len(group) * longest <= most


def test_an_encoder_gives_each_text_what_it_gets_alone_however_small_the_groups(tmp_path: Path) -> None:
    folder = encoders.write_case("bert", tmp_path / "m")
    expected = encoders.reference("bert")["mean"]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)

    async def body() -> None:
        for chunk in (1, 70, 4096):
            async with served(folder, prefill_chunk=chunk) as pipeline:
                mine = embedder(pipeline)
                found = await mine.embed(asked(*encoders.TEXTS))
                assert np.abs(vectors(found) - expected).max() < 1e-5
                ids = encoders.reference("bert")
                assert found.tokens == ids["lengths"].sum()
                rows = [row[:length].tolist() for row, length in zip(ids["ids"], ids["lengths"], strict=True)]
                assert vectors(await mine.embed(asked(*rows))).tolist() == vectors(found).tolist()
                stats = pipeline._engine.stats()
                assert stats.chunks >= 2
                assert stats.active_bytes > 0

    run(body)


def test_a_decoder_gives_the_normed_state_of_its_last_token_and_keeps_nothing(tmp_path: Path) -> None:
    folder = write_case("qwen3", tmp_path / "m")
    model = load_model(folder).model

    def expected(ids: list[int]) -> np.ndarray[Any, Any]:
        hidden = np.array(model(solo(mx.array(ids), model.make_caches(len(ids))))[-1])
        return hidden / np.linalg.norm(hidden)

    async def body() -> None:
        for chunk in (16, 4096):
            async with served(folder, prefill_chunk=chunk) as pipeline:
                mine = embedder(pipeline)
                found = vectors(await mine.embed(asked(*TEXTS)))
                for text, vector in zip(TEXTS, found, strict=True):
                    ids = pipeline.context.tokenizer.encode_text(text)
                    assert np.abs(vector - expected(ids)).max() < 1e-5
                cut = vectors(await mine.embed(asked(*TEXTS, dimensions=8)))
                shorter = found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True)
                assert np.abs(cut - shorter).max() < 1e-5
                assert (await pipeline.cache_report()).entries == 0

    run(body)


def test_answers_and_vectors_side_by_side_are_those_of_each_alone(tmp_path: Path) -> None:
    folder = write_case("llama_tied", tmp_path / "m")

    async def body() -> None:
        async with served(folder, max_rows=4, prefill_chunk=8) as pipeline:
            mine = embedder(pipeline)
            alone = vectors(await mine.embed(asked(*TEXTS)))
            answer = await ask(pipeline, request("alone"))
            many = asyncio.gather(*(mine.embed(asked(*TEXTS)) for _ in range(5)))
            answers = await asyncio.gather(*(ask(pipeline, request(f"r{n}")) for n in range(5)))
            for found in await many:
                assert np.abs(vectors(found) - alone).max() < 1e-5
            for each in answers:
                assert finish(each).usage.completion_tokens == finish(answer).usage.completion_tokens
            assert pipeline.num_streams == 0

    run(body)


def test_texts_give_way_to_the_kv_budget_and_come_to_their_end(tmp_path: Path) -> None:
    folder = write_case("llama_tied", tmp_path / "m")

    async def body() -> None:
        async with served(folder, prefill_chunk=16) as pipeline:
            alone = vectors(await embedder(pipeline).embed(asked(*TEXTS)))
            room = pipeline.kv.row_bytes(300)
        async with served(folder, prefill_chunk=16, kv_bytes=room) as pipeline:
            mine = embedder(pipeline)
            long = request("long", max_tokens=280)
            answer, *found = await asyncio.gather(
                ask(pipeline, long), *(mine.embed(asked(*TEXTS)) for _ in range(4))
            )
            assert finish(answer)
            for each in found:
                assert np.abs(vectors(each) - alone).max() < 1e-5
            assert pipeline._engine.stats().kv_bytes == 0

    run(body)


def test_a_request_that_leaves_ends_its_rows(tmp_path: Path) -> None:
    folder = write_case("llama_tied", tmp_path / "m")

    async def body() -> None:
        async with served(folder, prefill_chunk=4) as pipeline:
            task = asyncio.create_task(embedder(pipeline).embed(asked(*["the cat " * 40] * 20)))
            while not pipeline._engine.stats().chunks:
                await asyncio.wrap_future(pipeline._engine.call(lambda: None))
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await pipeline.drained()
            await asyncio.wrap_future(pipeline._engine.call(lambda: None))
            stats = pipeline._engine.stats()
            assert (stats.active, stats.waiting, stats.kv_bytes) == (0, 0, 0)

    run(body)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_embeddings_refuse_what_cannot_be_read_with_the_numbers(tmp_path: Path, name: str) -> None:
    is_encoder = name == "bert"
    folder = (encoders.write_case if is_encoder else write_case)(name, tmp_path / "m")

    async def body() -> None:
        async with served(folder, max_context=100) as pipeline:
            mine = embedder(pipeline)

            async def refused(request: EmbedRequest) -> Refused:
                with pytest.raises(Refused) as caught:
                    await mine.embed(request)
                return caught.value

            ends = 2 if is_encoder else 0
            long = (await refused(asked("a", "x" * 120))).failure
            assert (long.code, long.param) == (ErrorCode.CONTEXT_EXCEEDED, "input")
            assert (long.tokens, long.most_tokens) == (120 + ends, 100)
            assert "input[1]" in long.message
            ids = (await refused(asked([8] * 101))).failure
            assert (ids.code, ids.tokens) == (ErrorCode.CONTEXT_EXCEEDED, 101)
            assert (await refused(asked([100_000]))).failure.param == "input"
            assert (await refused(asked("a", dimensions=65))).failure.param == "dimensions"
            assert (await refused(asked("a", prompt_name="q"))).failure.param == "prompt_name"
            assert (await refused(asked())).failure.param == "input"
            assert (await mine.embed(asked("x" * 120, [8] * 101, truncate=-1))).tokens == 200
            cut = await mine.embed(asked("x" * 120, truncate=10))
            same = await mine.embed(asked("x" * (10 - ends)))
            assert cut == same
            assert vectors(await mine.embed(asked("x" * (100 - ends)))).shape[0] == 1
            pipeline.is_draining = True
            assert (await refused(asked("a"))).failure.code is ErrorCode.SHUTTING_DOWN

    run(body)


def test_prompts_go_before_texts_and_not_before_ids(tmp_path: Path) -> None:
    folder = encoders.write_case("bert", tmp_path / "m", config_sentence_transformers=PROMPTS)

    async def body() -> None:
        async with served(folder) as pipeline:
            mine = embedder(pipeline)

            async def same(one: EmbedRequest, text: str) -> bool:
                ids = pipeline.context.tokenizer.encode_text(text)
                return await mine.embed(one) == await mine.embed(asked(ids))

            assert await same(asked("cat"), "in the cat")
            assert await same(asked("cat", role="document"), "in the cat")
            assert await same(asked("cat", role="query"), "find the cat")
            assert await same(asked("cat", prompt_name="query"), "find the cat")
            assert await same(asked("cat", prompt="my "), "my cat")

    run(body)


@pytest.mark.parametrize("name", ["bert_reranker", "xlm_roberta_reranker"])
def test_rerank_by_a_cross_encoder_is_that_of_the_oracle(tmp_path: Path, name: str) -> None:
    folder = encoders.write_case(name, tmp_path / "m")
    query, documents = encoders.PAIRS[0][0], [pair[1] for pair in encoders.PAIRS]
    expected = 1 / (1 + np.exp(-encoders.reference(name)["logits"]))

    async def body() -> None:
        async with served(folder) as pipeline:
            mine = embedder(pipeline)
            found = await mine.rank(RankRequest(query=query, documents=documents))
            assert np.abs(np.array(found.scores) - expected).max() < 1e-5
            assert found.tokens == encoders.reference(name)["lengths"].sum()
            most = pipeline.context.context
            long = await mine.rank(RankRequest(query="q" * 500, documents=["d" * 500, "d"]))
            assert long.tokens < 2 * most + 1
            assert len(long.scores) == 2
            with pytest.raises(Refused, match="scores documents"):
                await mine.embed(asked("a"))
            with pytest.raises(Refused, match="does not write"):
                await pipeline.prepare(request())

    run(body)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_rerank_by_vectors_is_their_cosine(tmp_path: Path, name: str) -> None:
    folder = (encoders.write_case if name == "bert" else write_case)(name, tmp_path / "m")

    async def body() -> None:
        async with served(folder) as pipeline:
            mine = embedder(pipeline)
            found = await mine.rank(RankRequest(query="the cat", documents=["the cat", "東京", "the hat"]))
            a, *rows = vectors(await mine.embed(asked("the cat", "the cat", "東京", "the hat")))
            assert np.abs(np.array(found.scores) - [a @ row for row in rows]).max() < 1e-5
            assert abs(found.scores[0] - 1) < 1e-5

    run(body)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "weightedmean"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "include_prompt"),
        ("config_sentence_transformers.json", '{"prompts": 5}', "prompts"),
    ],
)
def test_a_decoder_whose_vectors_cannot_be_made_writes_all_the_same(
    tmp_path: Path, file: str, content: str, told: str
) -> None:
    folder = write_case("llama_tied", tmp_path / "m")
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)

    async def body() -> None:
        async with served(folder) as pipeline:
            assert pipeline.context.facts.dimensions == 0
            assert finish(await ask(pipeline, request())).usage.completion_tokens
            mine = embedder(pipeline)
            for asking in (
                lambda: mine.embed(asked("a")),
                lambda: mine.rank(RankRequest(query="a", documents=["b"])),
            ):
                with pytest.raises(Refused, match=told) as refused:
                    await asking()
                assert (refused.value.failure.code, refused.value.failure.param) == (
                    ErrorCode.UNSUPPORTED, "model"
                )  # fmt: skip

    run(body)


def test_a_decoder_saved_without_its_head_gives_vectors_and_does_not_write(tmp_path: Path) -> None:
    import json

    import safetensors.numpy

    whole = write_case("llama_biases", tmp_path / "whole")
    bare = write_case("llama_biases", tmp_path / "bare")
    file = bare / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(
        {name.removeprefix("model."): one for name, one in tensors.items() if "lm_head" not in name}, file
    )
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    (bare / "modules.json").write_text(json.dumps([*modules, {"type": "x.Normalize", "path": "1"}]))

    async def body() -> None:
        async with served(whole) as pipeline:
            assert pipeline.context.facts.kind == "chat"
            expected = await embedder(pipeline).embed(asked(*TEXTS))
        async with served(bare) as pipeline:
            assert (pipeline.context.facts.kind, pipeline.context.facts.dimensions) == ("embedding", 64)
            assert np.allclose(
                vectors(await embedder(pipeline).embed(asked(*TEXTS))), vectors(expected), atol=1e-6
            )
            with pytest.raises(Refused, match="does not write"):
                await pipeline.prepare(request())

    run(body)
