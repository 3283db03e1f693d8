"""Other settings, files or interpreters for models in memory: beside the old worker, and back on failure."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.harness import (
    CONFIG,
    Served,
    content,
    is_running,
    served,
    until,
)
from tests.process.test_pool import BIG, ROOM_FOR_ONE, ROOM_FOR_TWO, M, ask, expected


def patch_rows(server: Served, rows: int) -> None:
    assert server.http.patch("/admin/config", json={"models": {M: {"max_rows": rows}}}).status_code == 200


def rows_are(server: Served, rows: int) -> None:
    until(
        lambda: (row := server.running().get(M)) and row["phase"] == "ready" and row["rows"] == rows,
        f"{rows} rows",
    )


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


def test_what_runs_is_not_for_requests_to_choose(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for body in ({"models": {"b": {"python": "/bin/sh"}}}, {"models.b": {"python": "/bin/sh"}}):
            refused = server.http.patch("/admin/config", json=body)
            assert refused.status_code == 403
            assert "settings file only" in refused.json()["error"]["message"]


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


def test_limits_of_restarts_are_those_in_force(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        assert server.http.patch("/admin/config", json={"restart_budget": 0}).status_code == 200
        server.kill_worker()
        server.wait_state("exhausted")
