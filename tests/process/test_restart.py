"""Restart in place and after a kill: a real parent becomes another, and neither requests nor workers are lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import (
    DEADLINE_S,
    ROOT,
    Served,
    chat,
    content,
    frames,
    is_running,
    left_in,
    served,
    start,
    until,
)
from tests.process.test_shutdown import Streaming


def oracle(text: str, tokens: int = 12) -> str:
    return expected_text(wire.ChatPrompt([{"role": "user", "content": text}]), 7, tokens)


def mlxd(server: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    """`mlxd restart` as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "parent", "restart", "--data-dir", str(server.data_dir), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def status(server: Served) -> dict[str, Any]:
    answer = httpx2.get(f"{server.url}/admin/restart", timeout=DEADLINE_S, trust_env=False)
    found: dict[str, Any] = answer.json()
    return found


def begin(server: Served, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/admin/restart", json=body, timeout=DEADLINE_S, trust_env=False)


def test_restart_keeps_pid_address_lock_and_workers(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        worker = server.wait_state("ready")["pid"]
        before = status(server)
        done = mlxd(server)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"restarted: {server.url} (pid {server.process.pid})" in done.stdout
        after = status(server)
        assert after["boot"] != before["boot"]
        assert after["pid"] == server.process.pid
        assert server.engine()["pid"] == worker
        assert server.engine()["state"] == "ready"
        assert content(server.ask("x", stream=True).text) == oracle("x")
        assert json.loads((server.data_dir / "mlxd.lock").read_text())["boot"] == after["boot"]
        assert mlxd(server).returncode == 0  # and again
        assert server.engine()["pid"] == worker
        assert server.stop() == 0
        assert left_in(server.data_dir) == set()
    assert len(server.journal("spawned")) == 1
    assert len(server.journal("adopted")) == 2


def test_restart_lets_a_stream_finish_and_who_comes_meanwhile_is_answered_by_the_next(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 40, "ms_per_token": 25}) as server:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        accepted = begin(server)
        assert accepted.status_code == 202
        assert accepted.json()["state"] == "draining"
        assert content(server.ask("meanwhile", stream=True).text) == oracle("meanwhile", 40)
        stream.join()
        assert content(stream.received) == oracle("long", 40)
        assert status(server)["boot"] != accepted.json()["boot"]
    assert len(server.journal("spawned")) == 1


def test_restart_under_fire_fails_no_request(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 5, "ms_per_token": 5}) as server:
        server.wait_state("ready")
        enough = threading.Event()
        boot = status(server)["boot"]

        def client(number: int) -> list[str]:
            bodies = []
            while not enough.is_set():
                answer = httpx2.post(  # a connection of its own each time
                    f"{server.url}/v1/chat/completions",
                    json=chat(f"q {number}", stream=True),
                    timeout=DEADLINE_S,
                    trust_env=False,
                )
                assert answer.status_code == 200
                bodies.append(content(answer.text))
            return bodies

        with ThreadPoolExecutor(8) as threads:
            clients = [threads.submit(client, number) for number in range(8)]
            try:
                for _ in range(2):
                    assert mlxd(server).returncode == 0
            finally:
                enough.set()
        for number, each in enumerate(clients):
            assert set(each.result()) == {oracle(f"q {number}", 5)}
        assert status(server)["boot"] != boot
    assert len(server.journal("spawned")) == 1


def test_a_restart_is_given_up_where_answers_do_not_end_and_nothing_is_lost(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 60, "hold_after": 5}, drain_s=0.4) as server:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        refused = mlxd(server)
        assert refused.returncode == 1
        assert "1 answer still runs after 0.4 s; nothing was lost; `mlxd restart --now`" in refused.stderr
        assert server.ask("y", max_tokens=1).status_code == 200
        (server.model_dir / "release").touch()
        stream.join()
        assert content(stream.received) == oracle("long", 60)
        assert status(server)["state"] == "given_up"
        assert mlxd(server).returncode == 0


def test_restart_now_ends_streams_with_an_error_frame_and_keeps_the_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 5000, "ms_per_token": 20}) as server:
        worker = server.wait_state("ready")["pid"]
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        assert mlxd(server, "--now").returncode == 0
        stream.join()
        assert frames(stream.received)[-1]["error"]["code"] == "shutting_down"
        assert server.engine()["pid"] == worker
        assert server.ask("x", max_tokens=2).status_code == 200


def test_a_restart_into_a_program_that_would_not_start_is_refused_before_anything_happens(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        (server.data_dir / "mlxd.toml").write_text("no_such_setting = 1\n")
        refused = begin(server)
        assert refused.status_code == 409
        assert "would not start: " in refused.json()["error"]["message"]
        assert "no_such_setting" in refused.json()["error"]["message"]
        assert server.ask().status_code == 200
        (server.data_dir / "mlxd.toml").unlink()


def test_a_stop_wins_over_a_restart_that_waits(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 40, "ms_per_token": 20}) as server:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        assert begin(server).status_code == 202
        assert server.stop() == 0
        stream.join()
        assert content(stream.received) == oracle("long", 40)
        assert left_in(server.data_dir) == set()


def test_event_streams_end_for_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        with server.http.stream("GET", "/admin/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            assert begin(server).status_code == 202
            for _ in lines:  # to its proper end
                pass
        assert server.ask().status_code == 200


def test_restart_without_a_server_says_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "parent", "restart", "--data-dir", str(tmp_path / "data")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "no server runs on" in done.stderr


@pytest.mark.parametrize("body", [b"[]", b'{"now": "yes"}', b"nonsense"])
def test_a_restart_with_a_bad_body_is_refused(tmp_path: Path, body: bytes) -> None:
    with served(tmp_path) as server:
        answer = server.http.post("/admin/restart", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert status(server)["state"] == "serving"


def kill(server: Served) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(DEADLINE_S)


def test_a_killed_parent_started_again_adopts_its_workers(tmp_path: Path) -> None:
    with served(tmp_path) as first:
        worker = first.wait_state("ready")["pid"]
        kill(first)
        with served(tmp_path) as second:
            engine = second.wait_state("ready")
            assert (engine["pid"], engine["epoch"]) == (worker, 1)
            assert content(second.ask("x", stream=True).text) == oracle("x")
            second.kill_worker()
            until(lambda: second.engine()["epoch"] == 2 and second.engine()["state"] == "ready", "a next one")
            assert second.ask("x").status_code == 200
    assert len(second.journal("spawned")) == 2


def test_a_killed_parent_of_a_long_data_folder_is_adopted_from_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with served(deep) as first:
        before = first.wait_state("ready")
        kill(first)
        with served(deep) as second:
            after = second.wait_state("ready")
            assert (after["pid"], after["socket"]) == (before["pid"], before["socket"])
            assert second.stop() == 0
        assert not Path(before["socket"]).parent.exists()


def test_a_second_parent_on_the_data_folder_of_a_live_one_touches_none_of_its_workers(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        worker = server.wait_state("ready")["pid"]
        with start(tmp_path, {}, {}) as second:
            assert second.wait(DEADLINE_S) == 1
        assert f"process {server.process.pid} at {server.url}" in server.errors()
        assert is_running(worker)
        assert server.ask().status_code == 200


def test_a_parent_that_cannot_listen_leaves_the_workers_to_the_next(tmp_path: Path) -> None:
    with served(tmp_path) as first:
        worker = first.wait_state("ready")["pid"]
        kill(first)
        other = tmp_path / "other"
        other.mkdir()
        with served(other) as taken:
            port = int(taken.url.rpartition(":")[2])
            with start(tmp_path, {}, {"port": port}) as second:
                assert second.wait(DEADLINE_S) == 1
            assert "is taken by" in first.errors()
        with served(tmp_path) as third:
            assert third.wait_state("ready")["pid"] == worker


def test_a_worker_of_a_model_that_is_not_served_any_more_is_ended(tmp_path: Path) -> None:
    with served(tmp_path, models={"second": {}}) as first:
        first.wait_state("ready")
        assert first.http.post("/v1/models/second/load").status_code in (200, 202)
        other = first.wait_phase("second", "ready")["pid"]
        kill(first)
        with served(tmp_path) as second:
            assert second.wait_state("ready")
            until(lambda: not is_running(other), "the worker of the model that has gone")


def test_a_worker_that_was_stopped_by_its_parents_end_is_adopted(tmp_path: Path) -> None:
    with served(tmp_path) as first:
        worker = first.wait_state("ready")["pid"]
        kill(first)
        os.kill(worker, signal.SIGSTOP)
        with served(tmp_path) as second:
            assert second.wait_state("ready")["pid"] == worker


@pytest.mark.slow
def test_restart_keeps_the_real_worker_and_its_answers(tmp_path: Path) -> None:
    from tests.e2e.real import serving
    from tests.oracles.checkpoints import write_case

    with serving(write_case("llama_tied", tmp_path / "tiny"), tmp_path) as server:
        worker = server.wait_state("ready")["pid"]
        body = chat("the cat and the hat", stream=True, max_tokens=20)
        before = content(server.http.post("/v1/chat/completions", json=body).text)
        assert mlxd(server).returncode == 0
        assert server.engine()["pid"] == worker
        assert content(server.http.post("/v1/chat/completions", json=body).text) == before
        kill(server)
        with serving(tmp_path / "tiny", tmp_path) as after:
            assert after.wait_state("ready")["pid"] == worker
            assert content(after.http.post("/v1/chat/completions", json=body).text) == before


def test_restart_is_refused_where_a_worker_could_not_be_taken_over(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        server.wait_state("ready")
        in_the_way = server.data_dir / "run" / f".workers.json.{server.process.pid}"
        in_the_way.mkdir()  # as a full disk, it lets nobody write
        assert server.http.post("/v1/models/b/load", json={"wait": True}).status_code == 200
        refused = begin(server)
        assert refused.status_code == 409
        assert "workers.json cannot be written" in refused.json()["error"]["message"]
        assert server.ask("x", max_tokens=1).status_code == 200
        in_the_way.rmdir()
        assert mlxd(server).returncode == 0
        assert server.http.post("/v1/models/b/load", json={"wait": True}).status_code == 200
        assert server.stop() == 0
    for name in ("model", "b"):
        assert [len(server.journal(entry, name)) for entry in ("spawned", "adopted")] == [1, 1]
