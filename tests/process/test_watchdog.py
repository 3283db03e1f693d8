"""The watchdog over real processes: stopped, standing still, frozen, only slow; and a look at one on demand."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from parent.workers.client import WorkerLost
from parent.workers.states import Limits, State
from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import chat, content, served, until
from tests.process.supervised import become, down, reach, say, supervisor, write_script
from tests.process.test_crash import oracle


def logged(errors: str, name: str) -> list[dict[str, Any]]:
    """The lines of a parent's log with this event."""
    lines = (json.loads(line) for line in errors.splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == name]


def test_a_stopped_worker_is_woken_and_its_stream_goes_on_unbroken(tmp_path: Path) -> None:
    script = {"tokens": 20, "hang_after": 6, "ms_per_token": 1}
    with served(tmp_path, script, heartbeat_s=1.0) as server:
        assert content(server.ask("stop", stream=True).text) == oracle("stop", 20)
        assert server.engine()["epoch"] == 1
        (told,) = logged(server.errors(), "worker.stopped")
        assert told["next"] == "SIGCONT"
        assert len(server.journal("request")) == 1


def test_a_worker_that_is_stopped_again_and_again_is_replaced(tmp_path: Path) -> None:
    script = {"tokens": 20, "hang_after": 6, "hang_times": 5, "ms_per_token": 200}
    with served(tmp_path, script, heartbeat_s=1.0, stop_grace_s=0.3) as server:
        assert content(server.ask("stop", stream=True).text) == oracle("stop", 20)
        engine = server.engine()
        assert engine["epoch"] == 2
        assert "stopped 3 times within 60 s" in engine["last_exit"]["reason"]
        assert [told["next"] for told in logged(server.errors(), "worker.stopped")] == [
            "SIGCONT",
            "SIGCONT",
            "stop",
        ]


def test_a_worker_that_stands_still_is_replaced_and_its_stacks_are_in_the_log(tmp_path: Path) -> None:
    script = {"tokens": 20, "stall_after": 6, "ms_per_token": 1}
    with served(tmp_path, script, hung_s=0.5, stop_grace_s=0.3) as server:
        assert content(server.ask("still", stream=True).text) == oracle("still", 20)
        reason = server.engine()["last_exit"]["reason"]
        assert "1 running and 0 waiting requests got nowhere for" in reason
        assert "at 6 steps, 0 chunks, 6 tokens (the limit is 0 s" in reason
        (told,) = logged(server.errors(), "worker.stacks")
        assert "most recent call first" in told["stacks"]
        assert "worker.py" in told["stacks"]


def test_a_frozen_worker_writes_its_stacks_before_it_is_killed(tmp_path: Path) -> None:
    script = {"tokens": 20, "freeze_after": 6, "ms_per_token": 1, "ignore_term": True}
    with served(tmp_path, script, heartbeat_s=1.0, stop_grace_s=0.3) as server:
        assert content(server.ask("frozen", stream=True).text) == oracle("frozen", 20)
        (told,) = logged(server.errors(), "worker.stacks")
        assert "_generate" in told["stacks"]
        assert server.engine()["last_exit"]["signal"] == "SIGKILL"


def test_a_long_prefill_is_no_hang(tmp_path: Path) -> None:
    """No step, no token and no word for longer than the silence allows: heartbeats alone say that it lives."""
    with served(tmp_path, {"prefill_ms": 2500, "tokens": 5}, heartbeat_s=1.0, hung_s=60) as server:
        assert content(server.ask("long", stream=True).text) == oracle("long", 5)
        assert server.engine()["epoch"] == 1


def test_health_on_demand_computes_a_token_or_watches_the_work_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", {"ms_per_token": 20}))
        absent = await each.check(1.0)
        assert (absent.ok, absent.detail) == (False, "the worker is absent")
        each.want()
        await reach(each, State.READY)
        idle = await each.check(10.0)
        assert (idle.ok, idle.detail) == (True, "ok")
        assert idle.seconds > 0
        running = asyncio.create_task(say(each, 'x fake:{"tokens":200}'))
        await become(each, lambda: each.stats.active, "the request to run")
        assert (await each.check(10.0)).ok
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await down(each)

    asyncio.run(main())
    (checked, _) = [
        entry
        for line in (tmp_path / "model" / "journal.ndjson").read_text().splitlines()
        if (entry := json.loads(line))["what"] == "request"
    ]
    assert checked["id"].startswith("check-")


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ({"refuse": "engine_fault"}, "refused as told"),
        ({"fail_after": 0}, "the engine raised, as told"),
        ({"stall_after": 0}, "no answer within 0.5 s"),
    ],
)
def test_health_on_demand_says_what_is_wrong(tmp_path: Path, script: dict[str, Any], detail: str) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", script))
        each.want()
        await reach(each, State.READY)
        check = await each.check(0.5)
        assert not check.ok
        assert detail in check.detail
        await down(each)

    asyncio.run(main())


def test_health_on_demand_of_a_busy_worker_that_stands_still_is_bad(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", {"stall_after": 3}))
        each.want()
        await reach(each, State.READY)
        running = asyncio.create_task(say(each, "x"))
        await become(each, lambda: each.stats.tokens == 3, "the request to stand still")
        check = await each.check(0.5)
        assert (check.ok, check.detail) == (False, "no answer within 0.5 s")
        await down(each)
        assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], WorkerLost)

    asyncio.run(main())


def test_streams_that_are_cut_leave_the_worker_ready(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", {"ms_per_token": 20, "tokens": 500}))
        each.want()
        await reach(each, State.READY)
        running = asyncio.create_task(say(each, "x"))
        await become(each, lambda: each.stats.active, "the request to run")
        each.cut()
        assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], WorkerLost)
        assert each.state is State.READY
        short = 'y fake:{"tokens":3,"ms_per_token":0}'
        assert await say(each, short) == expected_text(wire.TextPrompt(short), 7, 3)
        await down(each)

    asyncio.run(main())


def test_a_gap_in_the_parents_clock_gives_a_start_its_time_again(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(
            tmp_path, write_script(tmp_path / "model", {"silent_load": True}), limits=Limits(load_stall_s=60)
        )
        each.want()
        await reach(each, State.LOADING)
        due = each.life.deadline_at
        assert due is not None
        each._deadline(due - 3600)  # the timer fires an hour late
        assert each.state is State.LOADING
        assert each.life.deadline_at is not None
        assert each.life.deadline_at != due
        await down(each)

    asyncio.run(main())


def test_an_idle_worker_that_was_stopped_answers_again(tmp_path: Path) -> None:
    with served(tmp_path, heartbeat_s=1.0) as server:
        worker = server.wait_state("ready")["pid"]
        os.kill(worker, signal.SIGSTOP)
        until(lambda: logged(server.errors(), "worker.stopped"), "the stop to be seen")
        assert server.http.post("/v1/chat/completions", json=chat("x")).status_code == 200
        assert server.engine()["pid"] == worker
