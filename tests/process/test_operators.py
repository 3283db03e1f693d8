"""What is asked of a model's stay: load, unload, restart, keep-alive, pins, and files that come and go."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.process.harness import (
    chat,
    content,
    frames,
    served,
    until,
    write_model,
)
from tests.process.test_pool import BIG, ROOM_FOR_ONE, M, ask, expected
from tests.process.test_rollout import patch_rows


def test_pool_load_and_unload_by_an_operator(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        loaded = server.http.post("/v1/models/b/load", json={"wait": True})
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        assert "b" in server.running()
        gone = server.http.post("/v1/models/b/unload", json={"wait": True})
        assert (gone.status_code, gone.json()["state"]) == (200, "absent")
        assert "b" not in server.running()
        assert ask(server, "b") == expected("hi")  # and it comes back when it is asked for
        assert server.http.post("/v1/models/nope/unload").status_code == 404
        assert server.http.post("/v1/models/b/unload", json={"mode": "x"}).status_code == 400


@pytest.mark.parametrize("mode", ["drain", "now", "if-idle"])
def test_pool_unload_modes_with_a_stream_in_flight(tmp_path: Path, mode: str) -> None:
    with served(tmp_path, {"tokens": 30, "ms_per_token": 30}) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            answer = server.http.post("/v1/models/fake/unload", json={"mode": mode})
            body = running.result().text
        if mode == "if-idle":
            assert answer.status_code == 409
            assert server.running()
        else:
            assert answer.status_code in (200, 202)
            server.wait_phase("org/fake-1b", "absent")
        if mode == "now":
            assert frames(body)[-1]["error"]["code"] == "unloaded"
        else:
            assert content(body) == expected("long", 30)


def test_pool_idle_time_and_keep_alive_of_a_request(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}, keep_alive_s=0.3) as server:
        ask(server, "fake")
        server.wait_phase("org/fake-1b", "absent")
        assert server.ask(model="b", keep_alive=-1).status_code == 200
        assert server.running()["b"]["expires_in_s"] is None
        assert server.ask(model="b", keep_alive="0").status_code == 200
        server.wait_phase("b", "absent")
        assert server.ask(model="b", keep_alive="soon").status_code == 400


def test_pool_a_load_stops_when_its_last_client_has_left(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"load_ms": 60_000}}, abandon_s=0.2) as server:
        server.wait_state("ready")
        with pytest.raises(httpx2.ReadTimeout):
            server.http.post("/v1/chat/completions", json=chat("x", model="b"), timeout=1.0)
        server.wait_phase("b", "absent")


def test_pool_pins_stay_and_a_pinned_set_over_the_budget_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = tmp_path / "data" / "mlxd.toml"
    config.write_text('[models."org/fake-1b"]\npin = true\n')
    with served(
        tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_ONE, linger_s=0, min_residency_s=0
    ) as server:
        ask(server, "fake")
        refused = server.ask(model="b")
        assert refused.status_code == 507
        assert "pinned models hold" in refused.json()["error"]["message"]
        assert server.http.post("/v1/models/fake/unload").status_code == 409
        bad = server.http.patch("/admin/config", json={"models": {"b": {"pin": True}}})
        assert bad.status_code == 507
        assert "pin fewer" in bad.json()["error"]["message"]
        assert '[models."b"]' not in config.read_text()


def test_pool_a_model_removed_on_disk_answers_who_is_here_and_leaves(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"tokens": 40, "ms_per_token": 25}}) as server:
        server.http.post("/v1/models/b/load", json={"wait": True})
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", model="b", stream=True)
            server.wait_journal_of("b", "request")
            (tmp_path / "b").rename(tmp_path / "gone")
            assert [row["id"] for row in server.http.get("/v1/models").json()["data"]] == ["org/fake-1b"]
            assert server.ask(model="b").status_code == 404
            assert content(running.result().text) == expected("long", 40)
        server.wait_phase("b", "absent")
        (tmp_path / "gone").rename(tmp_path / "b")
        assert server.ask(model="b").status_code == 200


def test_pool_a_model_that_was_away_is_served_again_once_it_is_back(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        (tmp_path / "b").rename(tmp_path / "away")
        assert server.ask(model="b").status_code == 404
        (tmp_path / "away").rename(tmp_path / "b")
        assert ask(server, "b") == expected("hi")
        server.http.post("/v1/models/b/unload", json={"wait": True})
        config = (tmp_path / "b" / "config.json").read_text()
        (tmp_path / "b" / "config.json").write_text("{}")
        broken = server.ask(model="b")
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "bad_checkpoint")
        (tmp_path / "b" / "config.json").write_text(config)
        assert ask(server, "b") == expected("hi")


def test_pool_a_resident_model_serves_on_when_its_files_are_broken(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        (tmp_path / "model" / "config.json").write_text("{}")
        assert server.http.get("/v1/models").json()["data"] == []
        assert ask(server, "fake") == expected("hi")
        row = server.running()["org/fake-1b"]
        assert (row["phase"], row["rollout"], row["epoch"]) == ("ready", None, 1)


def test_pool_unload_forgets_a_failure(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"fatal": "bad_checkpoint"}}) as server:
        assert server.ask(model="b").status_code == 503
        assert server.running()["b"]["state"] == "failed"
        gone = server.http.post("/v1/models/b/unload", json={"wait": True})
        assert (gone.status_code, gone.json()["state"]) == (200, "absent")
        write_model(tmp_path / "b", {})
        assert ask(server, "b") == expected("hi")


def test_pool_a_forgotten_failure_does_not_come_back_with_a_later_death(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"fatal": "bad_checkpoint"}}) as server:
        assert server.ask(model="b").status_code == 503
        server.http.post("/v1/models/b/unload", json={"wait": True})
        write_model(tmp_path / "b", {"tokens": 30, "ms_per_token": 20})
        assert ask(server, "b") == expected("hi", 30)
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", model="b", stream=True)
            until(lambda: len(server.journal("request", "b")) == 2, "the stream to run")
            os.kill(server.running()["b"]["pid"], signal.SIGKILL)
            assert content(running.result().text) == expected("long", 30)


def test_pool_unload_of_a_failed_model_whose_files_have_changed_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"fatal": "bad_checkpoint"}}) as server:
        assert server.ask(model="b").status_code == 503
        config = tmp_path / "b" / "config.json"
        config.write_text(config.read_text() + "\n")
        server.http.get("/v1/models")  # the change is seen
        gone = server.http.post("/v1/models/b/unload", json={"wait": True})
        assert (gone.status_code, gone.json()["state"], gone.json()["phase"]) == (200, "absent", "absent")


def test_pool_a_model_that_vanished_while_it_was_waited_for_is_served_once_it_is_back(tmp_path: Path) -> None:
    slow = {"tokens": 60, "ms_per_token": 20}
    with served(tmp_path, slow, {"b": {"fatal": "bad_checkpoint"}}, max_resident=1) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            waiting = threads.submit(server.ask, model="b")
            until(lambda: server.engine()["waiting"], "b to be waited for")
            (tmp_path / "b").rename(tmp_path / "gone")
            assert content(running.result().text) == expected("long", 60)
            assert waiting.result().status_code in (404, 503)
        assert server.ask(model="b").status_code == 404
        (tmp_path / "gone" / "fake.json").write_text("{}")  # which is none of the model's files
        (tmp_path / "gone").rename(tmp_path / "b")
        assert ask(server, "b") == expected("hi")


def test_pool_a_model_that_failed_for_good_is_tried_again_after_a_while(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"fatal": "bad_checkpoint"}}, half_open_s=0.3) as server:
        assert server.ask(model="b").status_code == 503
        write_model(tmp_path / "b", {})
        until(lambda: server.ask(model="b").status_code == 200, "the next try")


def test_pool_who_comes_during_a_drain_that_takes_too_long_waits_for_the_next_load(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 400, "ms_per_token": 25}, drain_s=0.5) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            server.http.post("/v1/models/fake/unload", json={"mode": "drain"})
            late = threads.submit(server.ask, "late", max_tokens=3)
            assert frames(running.result().text)[-1]["error"]["code"] == "unloaded"
            assert late.result().status_code == 200


def test_pool_load_keeps_a_model_that_a_request_wanted_gone(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        assert server.ask(model="b", keep_alive=0).status_code == 200
        server.wait_phase("b", "absent")
        loaded = server.http.post("/v1/models/b/load", json={"wait": True})
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        assert server.running()["b"]["expires_in_s"] is None


def test_pool_unload_now_cuts_what_is_draining_already(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 400, "ms_per_token": 25}, max_resident=1) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            patch_rows(server, 4)
            server.wait_state("draining")
            server.http.post("/v1/models/fake/unload", json={"mode": "now"})
            assert frames(running.result().text)[-1]["error"]["code"] == "unloaded"
        server.wait_phase(M, "absent")


def test_pool_a_restart_of_a_leaving_model_brings_it_back(tmp_path: Path) -> None:
    with served(tmp_path, {"ignore_shutdown": True, "ignore_term": True}, stop_grace_s=1.0) as server:
        server.wait_state("ready")
        server.http.post("/v1/models/fake/unload")
        server.wait_phase(M, "leaving")
        assert server.http.post("/admin/workers/fake/restart").status_code == 202
        server.wait_phase(M, "ready")
        assert server.engine()["epoch"] == 2
