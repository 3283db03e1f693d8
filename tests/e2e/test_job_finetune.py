"""A training as a person begins it: by the command, over the server and without one, and by the lab's route."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import DEADLINE_S, ROOT, Served, chat, until
from tests.train.lab import chats, write_data

OPTIONS = ("--iters", "6", "--rank", "2", "--steps-per-save", "2", "--steps-per-report", "2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    tiny = write_case("llama_tied", folder / "data" / "models" / "tiny")
    write_data(folder / "data" / "datasets" / "mine", chats(12))
    with serving(tiny, folder) as running:
        running.wait_state("ready")
        yield running


def mlxd(data: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "parent", *words],
        env={**os.environ, "MLXD_DATA_DIR": str(data), "MLXD_HF_CACHE": "none", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 4,
        check=False,
    )


def test_a_command_has_the_server_train_and_the_adapter_answers(server: Served) -> None:
    done = mlxd(server.data_dir, "finetune", "tiny", "mine", *OPTIONS, "--name", "made")
    assert done.returncode == 0, done.stderr
    assert "adapters/made is ready (6 steps, loss" in done.stdout
    assert "step 6: loss" in done.stderr
    (job,) = server.http.get("/api/jobs?kind=finetune").json()["jobs"]
    assert (job["status"], job["progress"], job["checkpoint"]["step"]) == ("done", 1.0, 4)
    assert job["needs_bytes"] > 0
    steps = server.http.get(f"/api/jobs/{job['id']}/metrics").json()["metrics"]
    assert [each["step"] for each in steps if each["kind"] == "train"] == [2, 4, 6]
    answer = server.http.post("/v1/chat/completions", json=chat("hi", model="tiny:made", max_tokens=3))
    assert answer.status_code == 200, answer.text
    again = mlxd(server.data_dir, "finetune", "tiny", "mine", "--name", "made")
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists; choose another name" in again.stderr


def test_the_route_of_the_lab_answers_with_the_place_of_the_adapter(server: Served) -> None:
    body = {"model_dir": "tiny", "data_dir": "mine", "iters": 2, "rank": 2, "method": "sft"}
    answer = server.http.post("/api/finetune/submit", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["adapter_path"] == str(server.data_dir / "adapters" / "tiny-sft")

    def over() -> str:
        status = server.http.get(f"/api/jobs/{found['job_id']}").json()["job"]["status"]
        return status if status in ("done", "failed") else ""

    assert until(over, "the job to be over", 60.0) == "done"
    assert (Path(found["adapter_path"]) / "adapters.safetensors").exists()


def test_a_training_that_is_killed_ends_with_the_same_adapter(server: Served) -> None:
    body = {"model": "tiny", "data": "mine", "iters": 60, "rank": 2, "lora_dropout": 0.1, "steps_per_save": 5}

    def begin(name: str) -> str:
        answer = server.http.post("/api/finetune/submit", json={**body, "name": name})
        return str(answer.json()["job_id"])

    def job_of(job_id: str) -> dict[str, Any]:
        return dict(server.http.get(f"/api/jobs/{job_id}").json()["job"])

    def saved(job_id: str, beyond: int) -> int:
        """The step of a checkpoint behind that one; 0 once the job is over."""
        job = job_of(job_id)
        step = job["checkpoint"]["step"] if job["checkpoint"] else 0
        return step if step > beyond else -1 if job["ended_at"] else 0

    undisturbed = begin("undisturbed")
    until(lambda: job_of(undisturbed)["ended_at"], "the undisturbed run", 120.0)
    killed, step = begin("killed"), 0
    for _ in range(3):
        step = until(lambda step=step: saved(killed, step), "a checkpoint", 60.0)
        if step < 0:
            break
        with contextlib.closing(sqlite3.connect(server.data_dir / "mlxd.sqlite", timeout=30)) as db:
            found = db.execute("SELECT worker FROM jobs WHERE id = ? AND worker != ''", (killed,)).fetchone()
        if found:
            os.kill(json.loads(found[0])["pid"], signal.SIGKILL)
    until(lambda: job_of(killed)["ended_at"], "the run that was killed", 180.0)
    job = job_of(killed)
    assert (job["status"], job["attempt"] > 1) == ("done", True), job
    files = [
        server.data_dir / "adapters" / name / "adapters.safetensors" for name in ("undisturbed", "killed")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_broken_data_fails_the_job_with_its_lines(server: Served) -> None:
    folder = server.data_dir / "datasets" / "broken"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    done = mlxd(server.data_dir, "finetune", "tiny", "broken")
    assert done.returncode == 1
    assert "line 2" in done.stderr


def test_without_a_server_the_command_trains_by_itself(server: Served, tmp_path: Path) -> None:
    shutil.copytree(server.data_dir / "models", tmp_path / "models")
    write_data(tmp_path / "elsewhere", chats(12))
    done = mlxd(tmp_path, "finetune", "tiny", str(tmp_path / "elsewhere"), *OPTIONS, "--name", "alone")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'adapters' / 'alone'} is ready" in done.stdout
