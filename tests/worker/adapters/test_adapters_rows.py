"""Rows with adapters in a whole worker: each in a batch is what it is alone, and kept prompts never cross."""

import asyncio
from pathlib import Path

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import TokenPrompt
from tests.adapters import ALL, QV, random_pairs, write_mlx
from tests.oracles.checkpoints import write_case
from tests.worker.asking import GREEDY, WARM, ask, finish, ids, request, run, served

PROMPTS = [
    [10 + (n * step) % 240 for n in range(length)] for step, length in ((7, 40), (11, 90), (5, 23), (3, 61))
]
STACKS: list[list[str]] = [[], ["a"], ["b"], ["a", "b"], ["a"], []]


@pytest.fixture(scope="module", params=["llama_tied", "qwen3_5"])
def model(request, tmp_path_factory) -> Path:
    return write_case(request.param, tmp_path_factory.mktemp("adapters") / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("adapters") / "model")


def adapter(model: Path, folder: Path, seed: int, leaves=QV) -> str:
    return str(write_mlx(folder, random_pairs(model, leaves, seed=seed), scale=1.0))


def asked(name: str, number: int, stack: list[str], sampling=GREEDY):
    prompt = TokenPrompt(PROMPTS[number % len(PROMPTS)])
    return request(name, prompt=prompt, adapters=stack, sampling=sampling, max_tokens=16)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_rows_of_different_adapters_in_one_batch_are_what_they_are_alone(model, sampling, tmp_path):
    async def body() -> None:
        async with served(model, prefill_chunk=32, prefix_cache_bytes=0) as pipeline:
            await pipeline.mount("a", adapter(model, tmp_path / "a", 1))
            await pipeline.mount("b", adapter(model, tmp_path / "b", 2, (*ALL, "lm_head")))
            alone = [
                ids(await ask(pipeline, asked("solo", n, stack, sampling))) for n, stack in enumerate(STACKS)
            ]
            together = await asyncio.gather(
                *(ask(pipeline, asked(f"r{n}", n, stack, sampling)) for n, stack in enumerate(STACKS))
            )
            assert [ids(events) for events in together] == alone
            assert alone[1] != ids(await ask(pipeline, asked("base", 1, [], sampling)))

    run(body)


def test_a_prompt_kept_by_one_adapter_is_never_used_for_another(llama, tmp_path):
    async def body() -> None:
        async with served(llama) as pipeline:
            path = adapter(llama, tmp_path / "a", 1)
            await pipeline.mount("a", path)
            await pipeline.mount("b", adapter(llama, tmp_path / "b", 2))

            async def reused(stack: list[str]) -> int:
                return finish(await ask(pipeline, asked("r", 1, stack))).usage.cached_tokens

            most = len(PROMPTS[1]) - 1
            assert [await reused(stack) for stack in ([], ["a"], ["b"], ["a", "b"], ["b", "a"])] == [0] * 5
            assert [await reused(stack) for stack in ([], ["a"], ["b"], ["a", "b"])] == [most] * 4
            await pipeline.unmount("a")
            await pipeline.mount("again", path)  # the same content under another name
            assert await reused(["again"]) == most
            adapter(llama, tmp_path / "a", 3)
            await pipeline.mount("changed", path)
            assert await reused(["changed"]) == 0
            write_mlx(tmp_path / "a", random_pairs(llama, QV, seed=3), scale=2.0)
            await pipeline.mount("stronger", path)
            assert await reused(["stronger"]) == 0

    run(body)


def test_a_prompt_kept_on_disk_is_found_by_the_same_adapter_alone(llama, tmp_path):
    launch = {"spill_dir": str(tmp_path / "kv"), "spill_bytes": 1 << 30}
    paths = {name: adapter(llama, tmp_path / name, seed) for seed, name in enumerate("ab")}

    async def first() -> None:
        async with served(llama, **launch) as pipeline:
            await pipeline.mount("a", paths["a"])
            await ask(pipeline, asked("r", 1, ["a"]))
            await pipeline.drained()
            await asyncio.wrap_future(pipeline._engine.spill(lambda: False))

    async def second() -> None:
        async with served(llama, **launch) as pipeline:
            for name, path in paths.items():
                await pipeline.mount(name, path)
            for stack, reused in (([], 0), (["b"], 0), (["a"], 64)):
                events = await ask(pipeline, asked("r", 1, stack))
                assert finish(events).usage.cached_tokens == reused

    run(first)
    run(second)


def test_an_adapter_that_is_unmounted_serves_its_rows_to_their_end(llama, tmp_path):
    async def body() -> None:
        async with served(llama, prefix_cache_bytes=0) as pipeline:
            await pipeline.mount("a", adapter(llama, tmp_path / "a", 1))
            expected = ids(await ask(pipeline, asked("r", 1, ["a"])))
            stream = await pipeline.prepare(asked("r", 1, ["a"]))
            found: list[int] = []
            async for events in pipeline.run(stream):
                found += ids(events)
                if len(found) == 3:
                    assert (await pipeline.unmount("a")).adapters == []
            assert found == expected
            with pytest.raises(Refused, match="not mounted") as refused:
                await ask(pipeline, asked("r", 1, ["a"]))
            assert refused.value.failure.code is ErrorCode.CONFLICT
            with pytest.raises(Refused, match="not mounted"):
                await pipeline.unmount("a")

    run(body)


def test_a_resumed_row_with_an_adapter_goes_on_with_it(llama, tmp_path):
    async def body() -> None:
        async with served(llama) as pipeline:
            await pipeline.mount("a", adapter(llama, tmp_path / "a", 1))
            whole = ids(await ask(pipeline, asked("r", 0, ["a"], WARM)))
            again = request(
                "s",
                prompt=TokenPrompt(PROMPTS[0]),
                adapters=["a"],
                sampling=WARM,
                max_tokens=16,
                resume=whole[:5],
            )
            assert ids(await ask(pipeline, again)) == whole[5:]

    run(body)


def test_a_row_with_an_adapter_that_gives_way_goes_on_with_it(llama, tmp_path):
    """So little KV that rows are preempted."""

    async def body() -> None:
        async with served(llama, prefix_cache_bytes=0) as pipeline:
            await pipeline.mount("a", adapter(llama, tmp_path / "a", 1))
            one = pipeline.kv.row_bytes(256)

            def long(name: str, stack: list[str]):
                return request(name, prompt=TokenPrompt(PROMPTS[1]), adapters=stack, max_tokens=240)

            alone = [ids(await ask(pipeline, long("r", stack))) for stack in ([], ["a"], [])]
            pipeline.resize(one * 2 + one // 2, 0)
            together = await asyncio.gather(
                *(ask(pipeline, long(f"r{n}", stack)) for n, stack in enumerate(([], ["a"], [])))
            )
            assert [ids(events) for events in together] == alone

    run(body)


def test_a_drained_worker_has_no_adapter_users_left(llama, tmp_path):
    async def body() -> None:
        async with served(llama) as pipeline:
            await pipeline.mount("a", adapter(llama, tmp_path / "a", 1))
            streams = [asyncio.create_task(ask(pipeline, asked(f"r{n}", n, ["a"]))) for n in range(3)]
            await asyncio.sleep(0)
            streams[1].cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await pipeline.drained()
            held = pipeline.context.loaded.adapters
            await asyncio.wrap_future(pipeline._engine.call(lambda: None))
            assert not held._users

    run(body)
