"""Adoption: parents that are really killed, and what becomes of their workers."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parent.workers import runtime_file
from parent.workers.process import started_at
from parent.workers.runtime_file import RuntimeRecord
from parent.workers.states import State
from shared import control, ndjson, wire
from shared.version import VERSION, WIRE
from tests.fakes.worker import expected_text
from tests.process.harness import is_running, until
from tests.process.supervised import become, down, kill, left, parent, say, supervisor, write_script

GRACE_S = 20.0


@contextlib.contextmanager
def orphan(tmp_path: Path, script: dict[str, Any] | None = None, grace_s: float = GRACE_S) -> Iterator[Any]:
    """The record of a worker whose parent has just been killed; no process of it is left afterwards."""
    model_dir = write_script(tmp_path / "model", script or {})
    kill(parent(tmp_path, model_dir, grace_s))
    record = left(tmp_path)
    try:
        yield record
    finally:
        if started_at(record.pid) == record.start_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
        until(lambda: not is_running(record.pid), "the worker has left", 10.0)


def journal(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "model" / "journal.ndjson").read_bytes().splitlines()
    return [msgspec.json.decode(line)["what"] for line in lines]


def test_a_worker_of_a_killed_parent_is_adopted_answers_and_was_not_loaded_again(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model", name="another")
        changes: list[State] = []
        each._on_change = lambda: changes.append(each.state)
        assert await each.adopt(record)
        assert (each.state, each.pid, each.life.epoch, each.name) == (State.READY, record.pid, 1, "w")
        assert changes[:1] == [State.READY]
        assert each.facts is not None
        assert each.facts.family == "fake"
        assert await say(each, "go on") == expected_text(wire.TextPrompt("go on"), 7, 12)
        await each.heartbeat()  # the control channel works in both directions
        again = each.record()
        assert again is not None
        ours = {"server": again.server, "server_start": again.server_start, "footprint": again.footprint}
        assert again == msgspec.structs.replace(record, **ours)
        assert again.server == os.getpid()
        await down(each)
        assert each.last_exit is not None
        assert "stopped" in each.last_exit.reason

    with orphan(tmp_path) as record:
        asyncio.run(main(record))
        assert not is_running(record.pid)
    assert journal(tmp_path) == ["spawned", "parent gone", "adopted", "request", "finished", "shutdown"]
    assert not Path(record.socket).exists()
    assert not Path(record.adopt_socket).exists()


def test_an_adopted_worker_that_dies_is_noticed_and_the_next_has_the_next_epoch(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert await each.adopt(record)
        os.kill(record.pid, signal.SIGKILL)
        await become(each, lambda: each.state is State.READY and each.life.epoch == 2, "the next worker")
        assert each.last_exit is not None
        assert "exit code is not known" in each.last_exit.reason
        assert each.pid != record.pid
        assert await say(each, "x") == expected_text(wire.TextPrompt("x"), 7, 12)
        await down(each)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))


def test_what_an_adopted_worker_prints_is_heard(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert await each.adopt(record)
        with contextlib.suppress(Exception):
            await say(each, 'x fake:{"crash_after":0}')
        await become(each, lambda: each.last_exit, "the exit")
        assert each.last_exit is not None
        assert "fake worker crashes as told" in each.last_exit.stderr
        await down(each)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))


def test_a_worker_is_adopted_from_parent_to_parent(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        first = supervisor(tmp_path, tmp_path / "model")
        assert await first.adopt(record)
        assert first._spawned is not None
        first._spawned.channel.close()  # as at its death
        first._watching.cancel()  # type: ignore[union-attr]
        second = supervisor(tmp_path, tmp_path / "model")
        assert await second.adopt(record)
        assert await say(second, "x") == expected_text(wire.TextPrompt("x"), 7, 12)
        await down(second)
        await become(first, lambda: first.state is not State.READY, "the first to notice the end")
        await down(first)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))


def test_nobody_comes_and_the_worker_leaves_by_itself(tmp_path: Path) -> None:
    with orphan(tmp_path, grace_s=0.3) as record:
        until(lambda: not is_running(record.pid), "the worker to leave")
    assert journal(tmp_path) == ["spawned", "parent gone"]


def test_a_worker_without_grace_or_in_mid_load_leaves_at_once(tmp_path: Path) -> None:
    with orphan(tmp_path, grace_s=0.0) as record:
        until(lambda: not is_running(record.pid), "the worker to leave")


def introduce(record: RuntimeRecord, line: bytes) -> bytes:
    """What the worker answers to a first line."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(10.0)
        end.connect(record.adopt_socket)
        end.sendall(line)
        try:
            return end.recv(100)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"\n",
        ndjson.encode(control.Adopt(WIRE, VERSION, "another nonce")),
        ndjson.encode(control.Shutdown()),
    ],
)
def test_whoever_does_not_know_the_nonce_is_turned_away_and_the_wait_goes_on(
    tmp_path: Path, line: bytes
) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert not (await asyncio.to_thread(introduce, record, line))
        assert is_running(record.pid)
        assert await each.adopt(record)
        await down(each)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))


def test_a_worker_that_cannot_be_adopted_is_ended(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert not await each.adopt(msgspec.structs.replace(record, nonce="wrong"))
        assert each.state is State.ABSENT
        assert not is_running(record.pid)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))
        assert not Path(record.adopt_socket).exists()


def test_a_worker_of_another_wire_is_ended_not_adopted(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert not await each.adopt(msgspec.structs.replace(record, wire=WIRE + 1))
        assert not is_running(record.pid)

    with orphan(tmp_path, {"ignore_term": True}) as record:
        asyncio.run(main(record))


def test_a_recycled_process_number_is_never_signalled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        record = RuntimeRecord(
            name="w",
            pid=innocent.pid,
            start_time=started_at(innocent.pid) - 100.0,
            socket=str(tmp_path / "w-1.sock"),
            adopt_socket=str(tmp_path / "w-1.ctl"),
            nonce="n",
            wire=WIRE,
            version=VERSION,
            launch=control.LaunchModel(model_id="m", path=str(tmp_path)),
            command=[],
            epoch=1,
        )
        for path in (record.socket, record.adopt_socket):
            Path(path).write_text("stale")

        async def main() -> None:
            assert not await supervisor(tmp_path, tmp_path).adopt(record)

        asyncio.run(main())
        assert innocent.poll() is None
        assert list(tmp_path.iterdir()) == []
        innocent.communicate(b"\n")
        assert innocent.returncode == 0


def test_a_stopped_worker_is_woken_and_adopted(tmp_path: Path) -> None:
    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert await each.adopt(record)
        await down(each)

    with orphan(tmp_path) as record:
        os.kill(record.pid, signal.SIGSTOP)
        asyncio.run(main(record))


def test_the_system_clock_was_set_and_the_worker_is_adopted_all_the_same(tmp_path: Path) -> None:
    """The moment at which a process began is told by that clock; the nonce proves it too."""

    async def main(record: RuntimeRecord) -> None:
        each = supervisor(tmp_path, tmp_path / "model")
        assert await each.adopt(msgspec.structs.replace(record, start_time=record.start_time + 3600))
        adopted = each.record()
        assert adopted is not None
        assert adopted.start_time == record.start_time
        await down(each)

    with orphan(tmp_path) as record:
        asyncio.run(main(record))


def test_the_runtime_file_is_private_whole_and_forgiving(tmp_path: Path) -> None:
    path = tmp_path / runtime_file.NAME
    assert runtime_file.read(path) == []
    with orphan(tmp_path, grace_s=0.0) as record:
        pass
    assert path.stat().st_mode & 0o777 == 0o600
    runtime_file.write(path, [record, record])
    assert runtime_file.read(path) == [record, record]
    assert sorted(each.name for each in tmp_path.iterdir() if "workers" in each.name) == [runtime_file.NAME]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert runtime_file.read(path) == []
    for number in (0, -1, 1 << 31, 1 << 40, 1 << 70):  # no pid of any system
        path.write_bytes(whole.replace(b'"pid":%d' % record.pid, b'"pid":%d' % number))
        assert runtime_file.read(path) == []


@pytest.mark.slow
def test_the_real_worker_is_adopted_with_its_weights(tmp_path: Path) -> None:
    from tests.oracles.checkpoints import write_case

    model_dir = write_case("llama_tied", tmp_path / "model")
    prompt = {"max_tokens": 8, "sampling": wire.Sampling(temperature=0.0)}
    kill(parent(tmp_path, model_dir, GRACE_S, real=True))
    record = left(tmp_path)

    async def main() -> None:
        each = supervisor(tmp_path, model_dir, real=True, heartbeat_s=5.0)
        wrong = control.Adopt(WIRE, VERSION, "another nonce")
        for line in (ndjson.encode(wrong), b"nonsense\n", b"x" * 10_000):
            assert not await asyncio.to_thread(introduce, record, line)
        assert await each.adopt(record)
        assert each.pid == record.pid
        first = await say(each, "the cat and the hat", **prompt)
        await each.heartbeat()
        assert (await each.check(20.0)).ok
        each.restart()
        await become(each, lambda: each.state is State.READY and each.life.epoch == 2, "a fresh worker")
        assert await say(each, "the cat and the hat", **prompt) == first
        await down(each)

    try:
        asyncio.run(main())
    finally:
        until(lambda: not is_running(record.pid), "the worker has left")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes a stopped child")
        ),
    ],
)
def test_the_real_worker_leaves_when_nobody_comes(tmp_path: Path, stopped: bool) -> None:
    from tests.oracles.checkpoints import write_case

    model_dir = write_case("llama_tied", tmp_path / "model")
    process = parent(tmp_path, model_dir, 0.5, real=True)
    record = left(tmp_path)
    if stopped:
        os.kill(record.pid, signal.SIGSTOP)
    kill(process)
    until(lambda: not is_running(record.pid), "the worker to leave")
