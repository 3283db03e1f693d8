"""Faults of a worker that no watchdog is needed for: it leaves without a word, talks nonsense, floods its output."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parent.workers.memory import SystemMemory
from parent.workers.process import RING_LINES, started_at
from parent.workers.states import Limits, State
from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import served
from tests.process.supervised import become, down, reach, say, supervisor, write_script


def test_a_worker_that_leaves_with_zero_while_loading_has_failed_all_the_same(tmp_path: Path) -> None:
    with served(tmp_path, {"exit_zero": True}, restart_budget=1) as server:
        engine = server.wait_state("exhausted")
        assert engine["restarts"] == 1
        assert engine["last_exit"]["code"] == 0
        answer = server.ask()
        assert answer.status_code == 503
        assert "left with exit code 0" in answer.json()["error"]["message"]


def test_some_nonsense_on_the_control_channel_is_passed_over(tmp_path: Path) -> None:
    with served(tmp_path, {"garbage_control": 10}) as server:
        server.wait_state("ready")
        assert server.errors().count("channel.unknown_message") == 10
        assert server.ask().status_code == 200


def test_nothing_but_nonsense_on_the_control_channel_ends_the_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"garbage_control": 5000, "silent_load": True}, restart_budget=0) as server:
        engine = server.wait_state("exhausted")
        assert "more than 100 messages that are none" in engine["last_exit"]["reason"]
        assert server.errors().count("channel.unknown_message") < 200


def test_a_flood_of_output_costs_neither_the_parent_nor_the_answers(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", {"flood": True}))
        each.want()
        await reach(each, State.READY)
        assert each._spawned is not None
        process = each._spawned.process
        await become(each, lambda: process.num_lines > 20 * RING_LINES, "a flood")
        assert len(process.lines) == RING_LINES
        assert await say(each, "x") == expected_text(wire.TextPrompt("x"), 7, 12)
        await down(each)
        assert each.last_exit is not None
        assert set(each.last_exit.stderr[:-1]) == {"a line of a worker that has lost its mind"}

    asyncio.run(main())


def test_a_line_without_an_end_is_kept_in_part(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, tmp_path)
        each.command = ["/bin/sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x; exit 1"]
        each.want()
        await become(each, lambda: each.last_exit, "the exit")
        assert each.last_exit is not None
        assert {len(line) for line in each.last_exit.stderr} == {4096}
        await down(each)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda each: setattr(each, "_runtime_dir", each._runtime_dir / ("d" * 120)),
            "AF_UNIX path too long",
        ),
        (lambda each: setattr(each, "command", ["/no/such/program"]), "No such file"),
    ],
)
def test_a_worker_that_cannot_be_started_says_why_and_leaves_no_socket(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    async def main() -> None:
        model = write_script(tmp_path / "model", {})
        each = supervisor(tmp_path, model, limits=Limits(restart_budget=0))
        change(each)
        each.want()
        await reach(each, State.EXHAUSTED)
        assert each.last_exit is not None
        assert "could not be started" in each.last_exit.reason
        assert said in each.last_exit.reason
        await down(each)

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_launch_and_command_hold_from_the_next_spawn(tmp_path: Path) -> None:
    async def main() -> None:
        each = supervisor(tmp_path, write_script(tmp_path / "model", {}))
        each.want()
        await reach(each, State.READY)
        first = each.running
        other = write_script(tmp_path / "other", {"tokens": 3})
        each.launch = type(each.launch)(model_id="other", path=str(other))
        assert each.running is first
        each.restart()
        await become(each, lambda: each.life.epoch == 2 and each.state is State.READY, "the next")
        assert each.running is not None
        assert first is not None
        assert each.running.path == str(other)
        assert each.running.nonce != first.nonce
        assert each.load_s > 0
        assert each.ready_at is not None
        await down(each)

    asyncio.run(main())


def test_the_footprint_of_a_process_is_what_only_it_holds(tmp_path: Path) -> None:
    ballast = 200 << 20

    async def main() -> int:
        model = write_script(tmp_path / "model", {"ballast": ballast, "footprint": 1 << 40})
        each = supervisor(tmp_path, model)
        each.want()
        await reach(each, State.READY)
        await become(each, lambda: each._memory.balance.footprint_bytes > ballast, "a look at its memory")
        # What the worker tells counts where it is more; its first heartbeat may come after that look.
        await become(each, lambda: each.footprint_bytes == 1 << 40, "what the worker tells")
        assert each.pid is not None
        alone = SystemMemory().footprint(each.pid)
        await down(each)
        assert each.footprint_bytes == 0
        return alone

    assert ballast < asyncio.run(main()) < 2 * ballast
    assert SystemMemory().footprint(2**22 + 1) == 0
    assert started_at(2**22 + 1) == 0
    assert 0 < SystemMemory().footprint(os.getpid()) < SystemMemory().used() * 2
