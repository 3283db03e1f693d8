"""Two workers after each other on tiny real models: what the first one drained to disk, the second one starts with."""

import asyncio
import json
from pathlib import Path

import pytest

from shared.wire import Event, TokenPrompt
from tests.oracles.checkpoints import write_case
from tests.worker.asking import GREEDY, WARM, ask, finish, ids, request, run, served, text
from worker.pipeline import Pipeline

PROMPT = [10 + n * 7 % 240 for n in range(150)]
BLOCKS = 128  # tokens of it in whole blocks


@pytest.fixture(scope="module", params=["llama_tied", "mistral_window", "rope_dynamic"])
def model(request, tmp_path_factory) -> Path:
    """Full caches, rotating ones, and keys that depend on the length of the sequence."""
    folder = write_case(request.param, tmp_path_factory.mktemp("spill") / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 512}))
    return folder


def launch(folder: Path, **more) -> dict:
    return {"spill_dir": str(folder), "spill_bytes": 1 << 30, "prefill_chunk": 64, **more}


def first(sampling=GREEDY):
    return request("first", prompt=TokenPrompt(PROMPT), max_tokens=20, sampling=sampling)


async def drain(pipeline: Pipeline) -> int:
    await pipeline.drained()
    return await asyncio.wrap_future(pipeline._engine.spill(lambda: False))


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_conversation_goes_on_in_the_next_worker_as_if_it_had_never_stopped(model, tmp_path, sampling):
    async def body() -> None:
        async with served(model, **launch(tmp_path)) as pipeline:
            said = ids(await ask(pipeline, first(sampling)))
            assert await drain(pipeline) > 0
        more = request("more", prompt=TokenPrompt([*PROMPT, *said, 40, 41]), max_tokens=20, sampling=sampling)
        async with served(model, prefill_chunk=64, prefix_cache_bytes=0) as pipeline:
            cold = await ask(pipeline, more)
        async with served(model, **launch(tmp_path)) as pipeline:
            before = pipeline._engine.stats()
            assert before.disk_bytes > before.restored_bytes == 0
            warm = await ask(pipeline, more)
            assert finish(cold).usage.cached_tokens == 0
            assert finish(warm).usage.cached_tokens == BLOCKS
            assert (ids(warm), text(warm)) == (ids(cold), text(cold))
            assert pipeline._engine.stats().restored_bytes > 0

    run(body)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("plain") / "model")


async def leave_something(model: Path, folder: Path, **more) -> list[Event]:
    async with served(model, **launch(folder, **more)) as pipeline:
        events = await ask(pipeline, first())
        await drain(pipeline)
    return events


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors")) if folder.is_dir() else []


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "float16"}, "model", "spilled file"],
    ids=["dtype", "model", "damage"],
)
def test_what_is_of_another_dtype_or_model_or_damaged_is_computed_again(plain, tmp_path, changed):
    async def body() -> None:
        model = write_case("llama_tied", tmp_path / "model")
        before = await leave_something(model, tmp_path / "kv")
        kept = files(tmp_path / "kv")
        assert len(kept) == 2
        if changed == "model":
            path = model / "config.json"
            path.write_text(path.read_text() + "\n")
        elif changed == "spilled file":
            for file in kept:
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 4
                file.write_bytes(data)
        options = changed if isinstance(changed, dict) else {}
        async with served(model, **launch(tmp_path / "kv", **options)) as pipeline:
            again = await ask(pipeline, first())
            assert finish(again).usage.cached_tokens == 0
            if "dtype" not in options:
                assert text(again) == text(before)
            await drain(pipeline)
        left = files(tmp_path / "kv")
        assert len(left) == 2
        assert not {*kept} & {*left} or changed == "spilled file"

    run(body)


def test_damaged_blocks_are_told_and_all_mended_within_one_workers_life(plain, tmp_path):
    async def body() -> None:
        before = await leave_something(plain, tmp_path / "kv")
        for file in files(tmp_path / "kv"):
            file.write_bytes(file.read_bytes()[:-1])
        told = []
        for cached in (0, BLOCKS):
            async with served(plain, **launch(tmp_path / "kv")) as pipeline:
                again = await ask(pipeline, first())
                assert finish(again).usage.cached_tokens == cached
                assert text(again) == text(before)
                told += (await pipeline.cache_report()).lookups
                await drain(pipeline)
        broken, mended = told
        assert (broken.reused, broken.from_memory, broken.from_disk) == (0, 0, 0)
        assert "a block on disk was damaged" in broken.reason
        assert "(tokens 0 to 64), and 1 more of the prompt" in broken.reason
        assert (mended.reused, mended.from_memory, mended.from_disk) == (BLOCKS, 0, BLOCKS)
        assert mended.reason == "128 tokens were on disk"

    run(body)


def test_the_report_says_how_much_came_from_where(plain, tmp_path):
    async def body() -> None:
        await leave_something(plain, tmp_path / "kv")
        async with served(plain, **launch(tmp_path / "kv")) as pipeline:
            for _ in range(2):
                await ask(pipeline, first())
            memory, disk = (await pipeline.cache_report()).lookups
            assert (disk.reused, disk.from_memory, disk.from_disk) == (BLOCKS, 0, BLOCKS)
            assert (memory.reused, memory.from_memory, memory.from_disk) == (149, 149, 0)
            assert memory.reason == "all of it was kept"

    run(body)


def test_zero_bytes_or_no_folder_is_off(plain, tmp_path):
    async def body() -> None:
        for off in ({"spill_bytes": 0}, {"spill_dir": ""}):
            await leave_something(plain, tmp_path / "kv", **off)
            assert not (tmp_path / "kv").exists()
        await leave_something(plain, tmp_path / "kv")
        assert len(files(tmp_path / "kv")) == 2
        async with served(plain, **launch(tmp_path / "kv", spill_bytes=0)) as pipeline:
            assert pipeline._engine.stats().restored_bytes == 0
            assert finish(await ask(pipeline, first())).usage.cached_tokens == 0
        assert len(files(tmp_path / "kv")) == 2

    run(body)


def test_a_floor_that_the_disk_does_not_reach_spills_nothing_and_drains_all_the_same(plain, tmp_path):
    async def body() -> None:
        await leave_something(plain, tmp_path / "kv", disk_floor_bytes=1 << 60)
        assert files(tmp_path / "kv") == []

    run(body)


def test_a_worker_that_crashes_after_a_restore_leaves_the_files_for_the_next(plain, tmp_path):
    async def body() -> None:
        await leave_something(plain, tmp_path / "kv")
        for _ in range(2):  # no drain: the first of the two is as good as killed
            async with served(plain, **launch(tmp_path / "kv")) as pipeline:
                assert finish(await ask(pipeline, first())).usage.cached_tokens == BLOCKS

    run(body)


def test_what_memory_may_not_hold_comes_from_disk_again_and_again(plain, tmp_path):
    async def body() -> None:
        await leave_something(plain, tmp_path / "kv")
        async with served(plain, **launch(tmp_path / "kv", prefix_cache_bytes=1000)) as pipeline:
            for n in (1, 2):
                assert finish(await ask(pipeline, first())).usage.cached_tokens == BLOCKS
                assert pipeline._engine.stats().restored_bytes == n * BLOCKS * 3 * 2 * 2 * 16 * 4

    run(body)


def test_the_report_says_why_a_prompt_was_not_found(plain, tmp_path):
    async def body() -> None:
        async with served(plain, **launch(tmp_path / "kv")) as pipeline:
            await ask(pipeline, first())
            other = [*PROMPT[:100], 65, 66, *PROMPT[102:]]
            await ask(pipeline, request("other", prompt=TokenPrompt(other), max_tokens=2, sampling=GREEDY))
            report = await pipeline.cache_report()
            assert (report.entries, report.prefix_limit) == (2, 1 << 30)
            newest, oldest = report.lookups
            assert (newest.prompt_tokens, newest.reused, newest.common) == (150, 100, 100)
            decode = pipeline.context.tokenizer.core.decode
            assert (newest.kept, newest.asked) == (decode([PROMPT[100]]), decode([65]))
            assert "number 100" in newest.reason
            assert oldest.reason == "nothing kept begins like it"

    run(body)
