"""Many models in one real parent: swaps, loads, unloads, the ledger, replacements beside running ones."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import (
    CONFIG,
    Served,
    chat,
    content,
    frames,
    is_running,
    served,
    until,
    write_model,
)

M = "org/fake-1b"
GB = 10**9
BIG = {"measured_bytes": 6 * GB}
ROOM_FOR_ONE = "10GB"
ROOM_FOR_TWO = "13GB"


def expected(text: str, count: int = 12) -> str:
    """What any fake model says to a chat of one message."""
    return expected_text(wire.ChatPrompt([{"role": "user", "content": text}]), 7, count)


def ask(server: Served, model: str, text: str = "hi") -> str:
    answer = server.ask(text, model=model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["message"]["content"])


def test_swap_between_two_models_with_room_for_one(tmp_path: Path) -> None:
    with served(
        tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_ONE, linger_s=0, min_residency_s=0
    ) as server:
        for model in ("fake", "b", "fake", "b"):
            assert ask(server, model) == expected("hi")
        assert list(server.running()) == ["b"]
        ledger = server.ledger()
        assert ledger["held_bytes"] <= ledger["budget_bytes"]
        assert len(server.journal("spawned")) == len(server.journal("spawned", "b")) == 2


def test_pool_keeps_both_models_where_there_is_room(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        for model in ("fake", "b", "fake", "b"):
            ask(server, model)
        assert len(server.running()) == 2
        assert len(server.journal("spawned")) == len(server.journal("spawned", "b")) == 1


def test_pool_count_limit_is_held(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}, max_resident=1, linger_s=0, min_residency_s=0) as server:
        ask(server, "fake")
        ask(server, "b")
        assert list(server.running()) == ["b"]


def test_pool_a_stream_in_flight_is_never_evicted(tmp_path: Path) -> None:
    slow = BIG | {"tokens": 40, "ms_per_token": 25}
    with served(
        tmp_path, slow, {"b": BIG}, memory_budget_bytes=ROOM_FOR_ONE, linger_s=0, min_residency_s=0
    ) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", model="fake", stream=True)
            server.wait_journal("request")
            other = threads.submit(ask, server, "b")
            assert content(running.result().text) == expected("long", 40)
            assert other.result() == expected("hi")


def test_pool_a_resident_model_answers_while_another_loads(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"load_ms": 5000}}, load_wait_s=60) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            cold = threads.submit(ask, server, "b")
            server.wait_phase("b", "loading")
            for number in range(5):
                ask(server, "fake", f"q{number}")
            assert server.running()["b"]["phase"] == "loading"
            assert cold.result() == expected("hi")


def test_pool_one_load_for_many_requests(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"load_ms": 500}}) as server:
        with ThreadPoolExecutor(12) as threads:
            texts = list(threads.map(lambda n: ask(server, "b", f"q{n}"), range(12)))
        assert texts == [expected(f"q{number}") for number in range(12)]
        assert len(server.journal("spawned", "b")) == 1


def test_pool_what_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"huge": {"measured_bytes": 99 * GB}}, memory_budget_bytes="10GB") as server:
        for stream in (False, True):
            answer = server.ask(model="huge", stream=stream)
            assert answer.status_code == 507
            message = answer.json()["error"]["message"]
            assert "huge needs 99" in message
            assert "memory_budget_bytes" in message


def test_swap_news_reach_waiting_streams_as_comments(tmp_path: Path) -> None:
    slow = {"load_ms": 2500, "load_steps": 5}
    with served(tmp_path, {}, {"b": slow}, keepalive_s=0.1) as server:
        body = server.ask(model="b", stream=True).text
        news = [line for line in body.splitlines() if line.startswith(": place")]
        assert any("place 1 of 1 for b; loading, weights" in line for line in news)
        assert content(body) == expected("hi")


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


def test_pool_profiles_share_one_worker_and_names_are_told_truly(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text(
        '[models."b"]\naliases = ["small"]\n[models."b".profiles.brief]\nmax_tokens = 3\n'
    )
    with served(tmp_path, {}, {"b": {}}) as server:
        assert ask(server, "b") == expected("hi")
        assert ask(server, "small:brief") == expected("hi", 3)
        assert ask(server, "b:brief") == expected("hi", 3)
        assert len(server.journal("spawned", "b")) == 1
        assert server.ask(model="b:verbose").status_code == 404


def test_pool_a_fallback_is_opt_in_and_named(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}, fallback="resident") as server:
        server.wait_state("ready")
        answer = server.ask(model="gpt-4")
        assert answer.status_code == 200
        assert answer.headers["x-mlxd-fallback"] == "org/fake-1b"
        assert answer.json()["model"] == "org/fake-1b"
        streamed = server.ask(model="gpt-4", stream=True)
        assert streamed.headers["x-mlxd-fallback"] == "org/fake-1b"
        assert {frame["model"] for frame in frames(streamed.text)} == {"org/fake-1b"}


def test_swap_of_settings_comes_up_beside_the_running_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 60, "ms_per_token": 20}) as server:
        server.wait_state("ready")
        before = server.engine()["pid"]
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            patched = server.http.patch("/admin/config", json={"models": {"org/fake-1b": {"max_rows": 3}}})
            assert patched.status_code == 200, patched.text
            until(lambda: server.engine()["pid"] not in (before, None), "the new worker to take over")
            assert server.engine()["state"] == "ready"
            assert content(running.result().text) == expected("long", 60)
        assert server.running()["org/fake-1b"]["rows"] == 3
        until(lambda: len(server.ledger()["accounts"]) == 1, "the old worker's account to be closed")


def test_swap_of_settings_drains_first_where_memory_has_no_room_for_both(tmp_path: Path) -> None:
    with served(tmp_path, BIG, memory_budget_bytes=ROOM_FOR_ONE) as server:
        server.wait_state("ready")
        before = server.engine()["pid"]
        server.http.patch("/admin/config", json={"models": {"org/fake-1b": {"max_rows": 3}}})
        until(lambda: server.engine()["pid"] not in (before, None), "a new worker")
        server.wait_state("ready")
        assert server.running()["org/fake-1b"]["rows"] == 3
        ask(server, "fake")


@pytest.mark.parametrize("room", [ROOM_FOR_ONE, ROOM_FOR_TWO])
def test_swap_to_settings_that_fail_leaves_the_old_worker_serving(tmp_path: Path, room: str) -> None:
    failing = BIG | {"fatal_with_rows": 3, "fatal": "bad_checkpoint"}
    with served(tmp_path, failing, memory_budget_bytes=room, restart_budget=1) as server:
        server.wait_state("ready")
        server.http.patch("/admin/config", json={"models": {"org/fake-1b": {"max_rows": 3}}})
        row = until(
            lambda: found if (found := server.running().get("org/fake-1b", {})).get("rollout") else None,
            "the rollout to fail",
        )
        assert "the old ones serve on" in row["rollout"]
        server.wait_state("ready")
        assert server.running()["org/fake-1b"]["rows"] == 8
        ask(server, "fake")


def test_ledger_eight_models_and_many_clients_on_a_budget_for_two(tmp_path: Path) -> None:
    models = {f"m{number}": BIG | {"tokens": 2} for number in range(7)}
    names = ["fake", *models]
    settings = {"burst_s": 0.2, "linger_s": 0.02, "min_residency_s": 0, "queue_limit": 200}
    with served(
        tmp_path, BIG | {"tokens": 2}, models, memory_budget_bytes=ROOM_FOR_TWO, **settings
    ) as server:
        peak = 0

        def one(number: int) -> str:
            nonlocal peak
            text = ask(server, names[number % 8], f"q{number}")
            peak = max(peak, server.ledger()["held_bytes"])
            return text

        with ThreadPoolExecutor(32) as threads:
            texts = list(threads.map(one, range(64)))
        assert texts == [expected(f"q{number}", 2) for number in range(64)]
        assert peak <= 13 * GB


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


def test_swap_to_a_model_that_was_replaced_on_disk(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        before = server.engine()["pid"]
        config = tmp_path / "model" / "config.json"
        config.write_text(json.dumps(CONFIG | {"max_position_embeddings": 2048}))
        assert server.http.get("/v1/models").status_code == 200  # looks at the disk
        until(lambda: server.engine()["pid"] not in (before, None), "a worker of the new files")
        server.wait_state("ready")
        assert ask(server, "fake") == expected("hi")


def test_swap_to_an_interpreter_that_does_not_run_goes_back_to_the_last_good_one(tmp_path: Path) -> None:
    with served(tmp_path, restart_budget=1) as server:
        server.wait_state("ready")
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        file = tmp_path / "data" / "mlxd.toml"
        file.write_text(f'[models."org/fake-1b"]\npython = "{broken}"\nmax_rows = 3\n')
        os.kill(server.process.pid, signal.SIGHUP)
        row = until(
            lambda: found if (found := server.running().get("org/fake-1b", {})).get("rollout") else None,
            "the rollout to fail",
        )
        assert "the old ones serve on" in row["rollout"]
        assert row["phase"] == "ready"
        assert ask(server, "fake") == expected("hi")
        file.write_text('[models."org/fake-1b"]\nmax_rows = 4\n')
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: server.running()["org/fake-1b"]["rows"] == 4, "the mended settings to be taken")


def test_a_broken_settings_file_changes_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        (tmp_path / "data" / "mlxd.toml").write_text("queue_limit = 'many'\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: "config.refused" in server.errors(), "the refusal in the log")
        assert ask(server, "fake") == expected("hi")


def test_running_and_fit_show_the_arithmetic(tmp_path: Path) -> None:
    with served(tmp_path, BIG, memory_budget_bytes=ROOM_FOR_ONE) as server:
        server.wait_state("ready")
        row = server.running()["org/fake-1b"]
        ledger = server.ledger()
        [account] = ledger["accounts"].values()
        grant = account["grant"]
        assert grant["weights"] == 6 * GB
        assert row["phase"] == "ready"
        assert row["reserved_bytes"] == sum(grant.values())
        assert ledger["budget_bytes"] == 10 * GB == ledger["free_bytes"] + ledger["held_bytes"]
        fit = server.http.get("/admin/fit", params={"model": "fake", "context": 1000}).json()
        assert (fit["fits"], fit["weights_bytes"], fit["context_tokens"]) == (True, 6 * GB, 1000)
        assert server.http.get("/admin/fit?context=x").status_code == 400


def test_ledger_a_resident_model_gives_up_room_before_another_is_loaded(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        ask(server, "fake")
        before = server.running()["org/fake-1b"]["reserved_bytes"]
        ask(server, "b")
        assert server.running()["org/fake-1b"]["reserved_bytes"] < before
        assert server.wait_journal("resized")[0]["prefix"] < 1 << 30
        assert len(server.running()) == 2


def test_what_runs_is_not_for_requests_to_choose(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for body in ({"models": {"b": {"python": "/bin/sh"}}}, {"models.b": {"python": "/bin/sh"}}):
            refused = server.http.patch("/admin/config", json=body)
            assert refused.status_code == 403
            assert "settings file only" in refused.json()["error"]["message"]


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


def test_fit_counts_with_the_limits_in_force(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text('[models."org/fake-1b"]\npin = true\n')
    with served(tmp_path, BIG, {"b": BIG}, max_resident=1, memory_budget_bytes="7GB") as server:
        fit = server.http.get("/admin/fit", params={"model": "b"}).json()
        assert fit["usable_bytes"] == 7 * GB
        assert "max_resident is 1" in fit["never"]
        assert fit["fits_beside"] is False


def patch_rows(server: Served, rows: int) -> None:
    assert server.http.patch("/admin/config", json={"models": {M: {"max_rows": rows}}}).status_code == 200


def rows_are(server: Served, rows: int) -> None:
    until(
        lambda: (row := server.running().get(M)) and row["phase"] == "ready" and row["rows"] == rows,
        f"{rows} rows",
    )


def test_swap_unload_now_ends_a_rollout_too(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 1500}) as server:
        server.wait_state("ready")
        patch_rows(server, 4)
        until(lambda: server.running()[M]["successor"], "a successor")
        server.http.post("/v1/models/fake/unload", json={"mode": "now", "wait": True})
        until(lambda: not server.ledger()["accounts"], "every account to be closed")
        assert ask(server, "fake") == expected("hi")
        rows_are(server, 4)
        patch_rows(server, 5)
        rows_are(server, 5)


@pytest.mark.parametrize("crash", [False, True])
def test_swap_settings_that_change_during_a_load_are_taken(tmp_path: Path, crash: bool) -> None:
    with served(tmp_path, {"load_ms": 1000}) as server:
        server.wait_state("ready")
        if crash:
            server.kill_worker()
        else:
            server.http.post("/v1/models/fake/unload", json={"wait": True})
            server.http.post("/v1/models/fake/load")
        server.wait_state("loading")
        patch_rows(server, 4)
        rows_are(server, 4)


def test_swap_several_changes_in_a_row_end_with_the_last(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 200}, max_resident=1) as server:
        server.wait_state("ready")
        for rows in (5, 4, 6):
            patch_rows(server, rows)
        rows_are(server, 6)


def test_adopt_after_a_kill_in_a_rollout_takes_the_successor(tmp_path: Path) -> None:
    slow = {"tokens": 200, "ms_per_token": 20}
    with served(tmp_path, slow) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", stream=True)
            server.wait_journal("request")
            old = server.engine()["pid"]
            patch_rows(server, 4)
            new = until(
                lambda: pid if (pid := server.engine()["pid"]) not in (old, None) else None, "the successor"
            )
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            assert running.exception() is not None
        with served(tmp_path, slow) as again:
            assert again.wait_state("ready")["pid"] == new
            assert len(again.journal("spawned")) == 2
            until(lambda: not is_running(old), "the old worker to be ended")


def test_ledger_a_worker_that_crashes_after_it_shrank_comes_back_as_small(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        ask(server, "fake")
        ask(server, "b")
        server.wait_journal("resized")
        small = server.running()[M]["reserved_bytes"]
        os.kill(server.running()[M]["pid"], signal.SIGKILL)
        launched = server.wait_journal("spawned", 2)[-1]
        assert launched["prefix"] == server.journal("resized")[-1]["prefix"]
        assert server.running()[M]["reserved_bytes"] == small


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


def test_limits_of_restarts_are_those_in_force(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        assert server.http.patch("/admin/config", json={"restart_budget": 0}).status_code == 200
        server.kill_worker()
        server.wait_state("exhausted")
