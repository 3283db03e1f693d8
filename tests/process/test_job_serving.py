"""Jobs beside a serving parent: answers come first, memory is shared, and a restart loses neither."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.process.harness import DEADLINE_S, ROOT, Served, chat, is_running, served, start, until
from tests.process.job_server import expected, value_of

MIB = 1 << 20


def submit(server: Served, **fields: Any) -> str:
    answer = server.http.post("/api/jobs", json={"kind": "count", "spec": fields})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job"]["id"])


def job_of(server: Served, job_id: str) -> dict[str, Any]:
    return dict(server.http.get(f"/api/jobs/{job_id}").json()["job"])


def wait(server: Served, job_id: str, **fields: Any) -> dict[str, Any]:
    """The job, once these fields of it are so."""
    return until(
        lambda: job if fields.items() <= (job := job_of(server, job_id)).items() else None,
        f"{job_id} with {fields}, not {job_of(server, job_id)}",
    )


def worker_of(server: Served) -> int:
    """The process of the one job."""

    def look() -> int:
        with contextlib.closing(sqlite3.connect(server.data_dir / "mlxd.sqlite", timeout=30)) as db:
            found = db.execute("SELECT worker FROM jobs WHERE worker != ''").fetchone()
        return int(json.loads(found[0])["pid"]) if found else 0

    return until(look, "the process of the job")


def mlxd(server: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "parent", *words, "--data-dir", str(server.data_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def answering(server: Served) -> Iterator[threading.Event]:
    """An answer that runs until the block ends or the event is set."""
    over, begun = threading.Event(), threading.Event()

    def ask() -> None:
        with (
            httpx2.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False) as http,
            http.stream(
                "POST",
                "/v1/chat/completions",
                json=chat('hi fake:{"ms_per_token":50}', stream=True, max_tokens=4000),
            ) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert begun.wait(DEADLINE_S)
        yield over
    finally:
        over.set()
        thread.join(DEADLINE_S)


def test_a_job_waits_between_two_steps_while_an_answer_runs(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 4000}, jobs_quiet_s=0.1) as server:
        server.wait_state("ready")
        job_id = submit(server, steps=2000, step_s=0.002, steps_per_save=100)
        wait(server, job_id, status="running", paused_for="")
        with answering(server) as over:
            job = wait(server, job_id, paused_for="answers")
            assert job["status"] == "running"
            over.set()
        wait(server, job_id, paused_for="")
        assert value_of(wait(server, job_id, status="done")) == expected(2000)


def test_a_job_is_charged_and_an_idle_model_leaves_for_it(tmp_path: Path) -> None:
    with served(
        tmp_path,
        {"measured_bytes": 60 * MIB},
        memory_budget_bytes=300 * MIB,
        prefix_cache_bytes=0,
        min_residency_s=0,
    ) as server:
        server.wait_state("ready")
        job_id = submit(server, steps=100_000, step_s=0.01, steps_per_save=10_000, bytes=250 * MIB)
        wait(server, job_id, status="running")
        account = server.ledger()["accounts"][job_id]
        assert (account["kind"], account["reserved_bytes"]) == ("job", 250 * MIB)
        assert server.engine()["state"] == "absent"
        answer = server.http.post(
            "/api/jobs", json={"kind": "count", "spec": {"bytes": 301 * MIB, "name": "x"}}
        )
        assert answer.status_code == 507, answer.text
        assert "can have at most" in answer.text
        server.http.post(f"/api/jobs/{job_id}/cancel")
        wait(server, job_id, status="cancelled")
        until(lambda: job_id not in server.ledger()["accounts"], "its account to be closed")
        assert server.ask("hi").status_code == 200


def test_requests_wait_for_an_exclusive_job_and_are_told_so(tmp_path: Path) -> None:
    with served(tmp_path, jobs_run="exclusive", load_wait_s=0.5) as server:
        server.wait_state("ready")
        job_id = submit(server, steps=100_000, step_s=0.01)
        wait(server, job_id, status="running")
        answer = server.ask("hi")
        assert answer.status_code == 503
        assert f"{job_id} has the machine to itself" in answer.text
        server.http.post(f"/api/jobs/{job_id}/cancel")
        wait(server, job_id, status="cancelled")
        assert server.ask("hi").status_code == 200


def test_a_restart_in_place_keeps_the_process_of_a_job(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        job_id = submit(server, steps=4000, step_s=0.005, steps_per_save=100)
        wait(server, job_id, status="running")
        pid = worker_of(server)
        done = mlxd(server, "restart")
        assert (done.returncode, done.stderr) == (0, "")
        assert worker_of(server) == pid
        job = wait(server, job_id, status="done")
        assert (value_of(job), job["attempt"]) == (expected(4000), 1)


def test_a_killed_server_is_followed_by_one_that_adopts_models_and_jobs(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        job_id = submit(server, steps=2000, step_s=0.005, steps_per_save=100)
        wait(server, job_id, status="running")
        pid, model = worker_of(server), server.engine()["pid"]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(DEADLINE_S)
        server.http.close()
        next_one = start(tmp_path, {}, {})
        assert next_one.stdout is not None
        url = next_one.stdout.readline().strip()
        after = Served(next_one, url, server.data_dir, server.model_dir)
        try:
            assert worker_of(after) == pid
            assert after.engine()["pid"] == model
            job = wait(after, job_id, status="done")
            assert (value_of(job), job["attempt"]) == (expected(2000), 1)
            until(lambda: not is_running(pid), "the process of the job to have left")
        finally:
            after.http.close()
            assert after.stop() == 0
            next_one.stdout.close()


def test_the_command_line_lists_shows_follows_and_moves_jobs(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert mlxd(server, "jobs").stdout == "no jobs yet\n"
        job_id = submit(server, steps=30, steps_per_save=10)
        followed = mlxd(server, "jobs", "follow", job_id)
        assert followed.returncode == 0, followed.stderr
        assert f"(30 steps: {expected(30)})" in followed.stdout
        assert "step 30: loss" in followed.stderr
        listed = mlxd(server, "jobs").stdout.splitlines()
        assert listed[0].split() == ["JOB", "KIND", "STATE", "PROGRESS", "AGE", "MAKES"]
        assert listed[1].startswith(job_id)
        assert " done " in listed[1]
        shown = mlxd(server, "jobs", "show", job_id.removeprefix("job_")[:8]).stdout
        assert f"30 steps: {expected(30)}" in shown
        assert "checkpoint after step 30" in mlxd(server, "jobs", "log", job_id).stdout
        busy = submit(server, steps=100_000, step_s=0.01, steps_per_save=10_000)
        wait(server, busy, status="running")
        assert "is stopping, then paused" in mlxd(server, "jobs", "pause", busy).stdout
        wait(server, busy, status="paused")
        assert mlxd(server, "jobs", "follow", busy).returncode == 1
        assert f"{busy} is queued" in mlxd(server, "jobs", "resume", busy).stdout
        mlxd(server, "jobs", "cancel", busy)
        wait(server, busy, status="cancelled")
        assert mlxd(server, "jobs", "rm", busy).stdout == f"{busy} is forgotten\n"
        gone = mlxd(server, "jobs", "show", busy)
        assert gone.returncode == 1
        assert "there is no job" in gone.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["jobs"], 1, "no server runs on"),
        (["jobs", "show"], 1, "no server runs on"),
        (["finetune", "nobody", "mine", "--detach"], 1, "leave --detach out"),
        (["finetune", "nobody", "mine", "--rank", "x"], 2, "invalid int value: 'x'"),
        (["finetune", "nobody", "mine"], 2, "model: "),
        (["finetune", "nobody", "mine", "--rank", "0"], 2, "rank: expected `int` >= 1"),
        (["quantize", "nobody", "--bits", "x"], 2, "invalid int value: 'x'"),
        (["dataset", "sft_qa_pairs", "pairs_text"], 2, "write FIELD=VALUE"),
        (["dataset", "sft_qa_pairs", "pairs_text=@/nonexistent"], 2, "cannot be read"),
    ],
)
def test_a_wrong_command_is_one_line(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parent", *words, "--data-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MLXD_HF_CACHE": "none"},
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert says in done.stderr
