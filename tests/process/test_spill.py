"""Drain and come back over the real protocol, with the real worker: what it kept is there again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared import wire
from shared.errors import Refused
from tests.oracles.checkpoints import write_case
from tests.process.supervised import become, down, reach, supervisor

PROMPT = wire.TokenPrompt([10 + n * 7 % 240 for n in range(200)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("spill") / "tiny")


async def ask(each: Supervisor) -> tuple[str, wire.Usage]:
    """The same request every time: its text and its usage."""
    assert each.client is not None
    request = wire.GenerateRequest(request_id=os.urandom(4).hex(), prompt=PROMPT, seed=3, max_tokens=30)
    said, usage = "", None
    async with await each.client.generate(request) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, wire.Text):
                    said += event.text
                if isinstance(event, wire.Finish):
                    usage = event.usage
    assert usage is not None
    return said, usage


async def drained(each: Supervisor) -> None:
    """Unload it as the pool does: drain, then stop."""
    each.unwant()
    await reach(each, State.ABSENT)


@pytest.mark.parametrize("end", ["drain", "kill"])
def test_an_unloaded_worker_comes_back_with_what_it_kept_and_a_killed_one_without_harm(
    tmp_path, model_dir, end
):
    async def body() -> None:
        each = supervisor(tmp_path, model_dir, real=True)
        kv = tmp_path / "kv"
        each.launch = replace(each.launch, spill_dir=str(kv), spill_bytes=1 << 30)
        each.want()
        await reach(each, State.READY)
        cold, usage = await ask(each)
        assert usage.cached_tokens == 0
        await drained(each)
        kept = sorted(kv.iterdir())
        assert len(kept) == 3

        each.want()
        await reach(each, State.READY)
        await become(each, lambda: each.stats.disk_bytes > 0, "the heartbeat tells what lies there")
        if end == "kill":
            pid = each.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await become(each, lambda: each.state is State.READY and each.pid != pid, "another worker")
        assert sorted(kv.iterdir()) == kept
        warm, usage = await ask(each)
        assert usage.cached_tokens == 192
        assert warm == cold
        assert each.client is not None
        report = await each.client.cache()
        assert report.restored_bytes > 0
        assert report.lookups[0].prompt_tokens == len(PROMPT.ids)
        await down(each)

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_drain_with_nothing_kept_or_nowhere_to_write_ends_as_any_other(tmp_path, model_dir):
    async def body() -> None:
        each = supervisor(tmp_path, model_dir, real=True)
        (tmp_path / "file").write_text("in the way")
        each.launch = replace(each.launch, spill_dir=str(tmp_path / "file" / "kv"), spill_bytes=1 << 30)
        for asks in (False, True):
            each.want()
            await reach(each, State.READY)
            if asks:
                await ask(each)
            await drained(each)
            assert each.last_exit is not None
            assert each.last_exit.code == 0

    asyncio.run(asyncio.wait_for(body(), 120))


def test_caps_reach_a_worker_that_runs(tmp_path, model_dir):
    """What was kept goes at once; what does not fit any more is refused with the new numbers."""

    async def body() -> None:
        each = supervisor(tmp_path, model_dir, real=True)
        each.want()
        await reach(each, State.READY)
        await ask(each)
        await become(each, lambda: each.stats.prefix_bytes > 1000, "something is kept")
        each.resize(kv_bytes=256 * 3 * 256, prefix_cache_bytes=1000)
        await become(each, lambda: each.stats.prefix_bytes <= 1000, "it went")
        assert each.client is not None
        long = wire.GenerateRequest(request_id="long", prompt=wire.TokenPrompt([9] * 300), seed=1)
        with pytest.raises(Refused, match="enough for 256 tokens"):
            await each.client.generate(long)
        await down(each)

    asyncio.run(asyncio.wait_for(body(), 120))
