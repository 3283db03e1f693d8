"""A KV budget in the whole worker on tiny real models: refused, clamped, preempted, and bytes against reality."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ErrorCode, Refused
from shared.kv_layout import KV_STEP
from shared.wire import Event, GenerateRequest, Prefill, Regex, Sampling, Started, TokenPrompt
from tests.oracles.checkpoints import write_case
from tests.worker.asking import GREEDY, WARM, ask, finish, ids, request, run, served, text
from worker.engine.engine import Engine

CONTEXT = 2048
PENALIZED = Sampling(
    1.0, repetition_penalty=1.2, frequency_penalty=0.3, frequency_window=0, logit_bias={40: 2.0}
)
LAYER = 2 * 2 * 16 * 4  # bytes of one token in one layer: K and V, KV heads, head size, float32


def blocks(count: float, layers: int = 3) -> int:
    """Bytes of so many blocks of tokens in each of the layers; three are those of `full`."""
    return int(count * layers * KV_STEP * LAYER)


def write(folder: Path, case: str = "llama_tied", **changes) -> Path:
    """A tiny model with a long context, and no token that ends an answer."""
    write_case(case, folder)
    (folder / "generation_config.json").unlink()
    edits = {
        "config.json": {"max_position_embeddings": CONTEXT, "eos_token_id": None, **changes},
        "tokenizer_config.json": {"eos_token": None},
    }
    for name, edit in edits.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("full") / "model")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """One sliding layer and one that sees everything."""
    kinds = ["sliding_attention", "full_attention"]
    folder = tmp_path_factory.mktemp("mixed") / "model"
    return write(folder, "mistral_window", layer_types=kinds, sliding_window=40)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("sliding") / "model", "mistral_window")


@pytest.fixture(scope="module")
def models(full, mixed, sliding) -> dict[str, Path]:
    return {"full": full, "mixed": mixed, "sliding": sliding}


class Watch:
    """Looks at the rows on the engine thread, at every output: who was preempted, and whether promises hold."""

    def __init__(self, on_preempted: Callable[[], None] = lambda: None) -> None:
        self._on_preempted = on_preempted
        self.preempted: set[str] = set()
        self.wrong: list[str] = []
        self.most_held = 0

    def __call__(self, engine: Engine) -> None:
        line = engine._scheduler
        if any(row.was_preempted for row in line.waiting):
            self._on_preempted()
        held = 0
        for row in line.active:
            if row.was_preempted:
                self.preempted.add(row.id)
            mine = sum(cache.nbytes for cache in row.caches or [])
            held += mine
            if mine > line.kv.row_bytes(row.promised):
                self.wrong.append(
                    f"{row.id} holds {mine} bytes with {row.num_cached} of {row.promised} tokens"
                )
        if held > line.promised_bytes or not line.kv.holds(line.promised_bytes):
            self.wrong.append(f"{held} bytes held, {line.promised_bytes} promised, limit {line.kv.limit}")
        self.most_held = max(self.most_held, held)


@pytest.mark.parametrize(
    ("launch", "asked", "most"),
    [
        ({}, {}, CONTEXT),
        ({}, {"max_context": 700}, 700),
        ({}, {"max_context": 10_000}, CONTEXT),
        ({"max_context": 600}, {"max_context": 700}, 600),
        ({"kv_bytes": blocks(3)}, {}, 768),
        ({"kv_bytes": blocks(3.5)}, {}, 768),
        ({"kv_bytes": blocks(3)}, {"max_context": 500}, 500),
        ({"kv_bytes": blocks(3)}, {"max_tokens": 20}, 768),
        ({"kv_bytes": blocks(100)}, {}, CONTEXT),
    ],
)
def test_max_tokens_is_clamped_to_what_fits(full, launch, asked, most):
    async def body() -> None:
        async with served(full, **launch) as pipeline:
            stream = await pipeline.prepare(
                request(prompt=TokenPrompt([9] * 100), **{"max_tokens": None, **asked})
            )
            assert stream.sequence.max_tokens == asked.get("max_tokens", most - 100)

    run(body)


def test_started_tells_how_much_of_an_answer_fits_and_the_end_is_length(full):
    async def body() -> None:
        async with served(full, kv_bytes=blocks(1)) as pipeline:
            events = await ask(pipeline, request(prompt=TokenPrompt([9] * 200), max_tokens=10_000))
            assert isinstance(events[0], Started)
            assert events[0].context_left == 56
            assert finish(events).usage.completion_tokens == 56
            assert finish(events).reason == "length"

    run(body)


@pytest.mark.parametrize(
    ("launch", "asked", "tokens", "code", "words"),
    [
        ({"kv_bytes": blocks(1)}, {}, 256, ErrorCode.CANNOT_FIT, r"256 tokens .* at least 1 tokens"),
        (
            {"kv_bytes": blocks(2)},
            {},
            700,
            ErrorCode.CANNOT_FIT,
            r"700 tokens .* 590 kB of KV cache; .* 393 kB for it \(kv_bytes\), enough for 512 tokens; "
            r"shorten the prompt by at least 189 tokens, or raise kv_bytes",
        ),
        (
            {},
            {"max_context": 50},
            50,
            ErrorCode.CONTEXT_EXCEEDED,
            "50 tokens and its context is 50 .* at least 1",
        ),
        ({}, {"max_context": 9999}, CONTEXT, ErrorCode.CONTEXT_EXCEEDED, f"model's context is {CONTEXT}"),
        ({"kv_bytes": blocks(2)}, {"max_context": 80}, 600, ErrorCode.CONTEXT_EXCEEDED, "context is 80"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(full, launch, asked, tokens, code, words):
    async def body() -> None:
        async with served(full, **launch) as pipeline:
            with pytest.raises(Refused, match=words) as caught:
                await pipeline.prepare(request(prompt=TokenPrompt([9] * tokens), **asked))
            assert caught.value.failure.code is code
            assert caught.value.failure.param == "prompt"
            failure = caught.value.failure
            assert failure.tokens == tokens
            assert failure.most_tokens == tokens - int(re.findall(r"at least (\d+)", failure.message)[0])

    run(body)


def test_a_budget_that_holds_nothing_is_refused_at_the_start(full):
    async def body() -> None:
        async with served(full, kv_bytes=1000):
            raise AssertionError("it was loaded")

    with pytest.raises(Refused, match=r"kv_bytes is 1 kB, .* takes 197 kB; raise kv_bytes") as caught:
        run(body)
    assert caught.value.failure.code is ErrorCode.CANNOT_FIT


@pytest.fixture(scope="module")
def alone(models) -> Callable[[str], list[list[Event]]]:
    """What each of the crowd says when nobody else is there, by model."""
    said: dict[str, list[list[Event]]] = {}

    def of(model: str) -> list[list[Event]]:
        async def body() -> None:
            async with served(models[model], prefill_chunk=96, prefix_cache_bytes=0) as pipeline:
                said[model] = [await ask(pipeline, one) for one in crowd()]

        if model not in said:
            run(body)
        return said[model]

    return of


def crowd() -> list[GenerateRequest]:
    """Some outgrow the blocks that they were admitted with, some do not."""
    return [
        ask_for("a", 200, 340, GREEDY),
        ask_for("b", 250, 340, PENALIZED, logprobs=2),
        ask_for("c", 5, 265, GREEDY),
        ask_for("d", 240, 280, WARM, grammar=Regex("[a-z ]{500}")),
        ask_for("e", 30, 30, WARM),
    ]


@pytest.mark.parametrize(
    ("model", "budget", "kept"),
    [
        ("full", blocks(5), 0),
        ("full", blocks(5), 64 << 20),
        ("mixed", blocks(7, layers=1), 0),
        ("mixed", blocks(7, layers=1), 64 << 20),
        ("sliding", blocks(2, layers=2), 64 << 20),
    ],
)
def test_preempted_rows_say_what_they_say_alone_and_bytes_stay_within_the_promise(
    models, alone, model, budget, kept
):
    async def body() -> None:
        watch = Watch()
        launch = {"prefill_chunk": 96, "kv_bytes": budget, "prefix_cache_bytes": kept}
        async with served(models[model], watch, **launch) as pipeline:
            together = await asyncio.gather(*(ask(pipeline, one) for one in crowd()))
            assert pipeline._engine.stats().kv_bytes == 0
        assert watch.wrong == []
        assert 0 < watch.most_held <= budget
        assert bool(watch.preempted) == (model != "sliding")  # a sliding layer never outgrows its first block
        for mine, other in zip(together, expected, strict=True):
            assert ids(mine) == ids(other)
            assert text(mine) == text(other)
            assert finish(mine).usage.completion_tokens == finish(other).usage.completion_tokens
            assert sum(isinstance(event, Started) for event in mine) == 1
            done = [event.done for event in mine if isinstance(event, Prefill)]
            assert done == sorted(set(done))

    expected = alone(model)
    run(body)


def ask_for(name: str, tokens: int, max_tokens: int, sampling: Sampling, **more) -> GenerateRequest:
    prompt = TokenPrompt([(ord(name) + n * 7) % 250 + 10 for n in range(tokens)])
    return request(name, prompt=prompt, max_tokens=max_tokens, sampling=sampling, seed=ord(name), **more)


def test_rows_that_branch_off_a_long_kept_prompt_hold_no_more_than_their_share(full):
    """A clone of a cache with much more in it: what is held is what the row may hold, not what the entry does."""

    async def body() -> None:
        watch = Watch()
        async with served(full, watch, kv_bytes=blocks(8)) as pipeline:
            words = [10 + n % 200 for n in range(1200)]
            await ask(pipeline, request("long", prompt=TokenPrompt(words), max_tokens=3))
            for cut in (20, 100, 300):
                events = await ask(pipeline, request(f"cut{cut}", prompt=TokenPrompt(words[:cut])))
                assert finish(events).usage.cached_tokens == cut - 1
        assert watch.wrong == []

    run(body)


def test_a_cancel_reaches_a_row_that_waits_after_being_preempted(full):
    async def body() -> None:
        loop, preempted = asyncio.get_running_loop(), asyncio.Event()
        watch = Watch(lambda: loop.call_soon_threadsafe(preempted.set))
        async with served(full, watch, kv_bytes=blocks(4)) as pipeline:
            first = asyncio.create_task(ask(pipeline, ask_for("a", 240, 300, WARM)))
            second = asyncio.create_task(ask(pipeline, ask_for("b", 200, 340, WARM)))
            await preempted.wait()
            second.cancel()
            assert finish(await first).usage.completion_tokens == 300
            await asyncio.wait_for(pipeline.drained(), 10)
            assert pipeline._engine.stats().waiting == 0
        assert watch.wrong == []

    run(body)


def test_caps_that_change_hold_for_what_comes_and_what_runs_comes_to_its_end(full):
    async def body() -> None:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def watch(engine: Engine) -> None:
            if engine.stats().tokens > 20:
                loop.call_soon_threadsafe(started.set)

        async with served(full) as pipeline:
            alone = [ids(await ask(pipeline, ask_for(name, 200, 400, WARM))) for name in "ab"]
        async with served(full, watch) as pipeline:
            running = [asyncio.create_task(ask(pipeline, ask_for(name, 200, 400, WARM))) for name in "ab"]
            await started.wait()
            pipeline.resize(kv_bytes=blocks(1), prefix_cache_bytes=1000)
            with pytest.raises(Refused, match="enough for 256 tokens"):
                await pipeline.prepare(ask_for("c", 300, 10, GREEDY))
            assert (await pipeline.prepare(ask_for("d", 200, 400, GREEDY))).sequence.max_tokens == 56
            assert [ids(await one) for one in running] == alone
            assert pipeline._engine.stats().prefix_bytes <= 1000

    run(body)
