"""Jobs outlive their server, and servers outlive their jobs: kill -9 of either or both, at any moment."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests.process.harness import is_running, until
from tests.process.job_server import JobServer, expected, job_server, value_of


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), f"{pid} to be gone")


def steps_told(server: JobServer, job_id: str) -> set[int]:
    return {each["step"] for each in server.events(job_id, "metric")}


def test_a_parent_that_is_killed_is_followed_by_one_that_adopts_the_job(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=2400, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.kill()
        server.start()
        assert server.worker() == pid
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(2400), 1)
        assert steps_told(server, job_id) == set(range(20, 2401, 20))
        states = [each["state"] for each in server.events(job_id, "state")]
        assert states == ["queued", "starting", "running", "stopping", "done"]
        ids = [each["id"] for each in server.events(job_id)]
        assert ids == list(range(1, len(ids) + 1))


def test_what_a_job_did_to_its_end_without_a_parent_is_known_to_the_next_one(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=200, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.kill()
        until(lambda: not is_running(pid), "the job to end by itself")
        server.start()
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"], job["message"]) == (
            expected(200),
            1,
            f"200 steps: {expected(200)}",
        )
        assert steps_told(server, job_id) == set(range(20, 201, 20))


@pytest.mark.parametrize("first", ["parent", "job"])
def test_where_both_are_killed_the_job_goes_on_from_its_checkpoint(tmp_path: Path, first: str) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=400, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        if first == "job":
            os.kill(server.process.pid, signal.SIGSTOP)  # it must not see it
            kill(pid)
            server.kill()
        else:
            server.kill()
            kill(pid)
        server.start()
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(400), 2)
        assert steps_told(server, job_id) == set(range(20, 401, 20))


def test_a_job_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=400, step_s=0.005, steps_per_save=20)
        for _ in range(4):  # more than the three tries without anything new
            saved = server.wait_saved(job_id)["checkpoint"]["step"]
            kill(server.worker())
            server.wait_saved(job_id, saved)
        job = server.wait(job_id, "done", "failed")
        assert value_of(job) == expected(400)
        assert job["attempt"] >= 5


def test_a_job_leaves_when_no_parent_comes_and_the_next_one_goes_on_with_it(tmp_path: Path) -> None:
    with job_server(tmp_path, grace_s=0.5) as server:
        job_id = server.submit(steps=2000, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.kill()
        until(lambda: not is_running(pid), "the job to give up")
        server.start()
        server.wait_saved(job_id, 100)
        assert server.job(job_id)["attempt"] == 2
        assert server.worker() != pid


def test_a_job_that_cannot_go_on_is_adopted_too_and_is_interrupted_only_where_it_died(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        lives = server.submit(steps=400, step_s=0.005)  # no checkpoint
        server.wait(lives, "running")
        server.kill()
        server.start()
        job = server.wait(lives, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(400), 1)
        dies = server.submit("noop", steps=100_000_000)
        server.wait(dies, "running")
        pid = server.worker()
        server.kill()
        kill(pid)
        server.start()
        job = server.wait(dies, "failed")
        assert "interrupted: the server that ran it" in job["error"]["message"]
        assert job["error"]["advice"] == "retry begins it again"


def test_a_process_of_a_job_that_somebody_stopped_is_woken_and_adopted(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=300, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        os.kill(pid, signal.SIGSTOP)
        server.kill()
        server.start()
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(300), 1)


def test_a_stranger_with_a_wrong_nonce_gets_nothing_and_the_parent_still_does(tmp_path: Path) -> None:
    import socket
    import sqlite3

    with job_server(tmp_path) as server:
        job_id = server.submit(steps=2400, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.kill()
        with sqlite3.connect(server.data / "mlxd.sqlite") as db:
            record = json.loads(db.execute("SELECT worker FROM jobs").fetchone()[0])
        db.close()
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(record["adopt_socket"])
            end.sendall(b'{"type":"adopt","wire":%d,"version":"x","nonce":"no"}\n' % record["wire"])
            assert end.recv(100) == b""
        server.start()
        assert server.worker() == pid
        assert value_of(server.wait(job_id, "done", "failed")) == expected(2400)


def test_a_row_of_another_wire_is_ended_and_begun_again(tmp_path: Path) -> None:
    import sqlite3

    with job_server(tmp_path) as server:
        job_id = server.submit(steps=400, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.kill()
        with sqlite3.connect(server.data / "mlxd.sqlite") as db:
            db.execute("UPDATE jobs SET worker = json_set(worker, '$.wire', 99)")
        db.close()
        server.start()
        assert not is_running(pid)
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(400), 2)


def test_a_server_that_is_stopped_ends_the_process_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=400, step_s=0.005, steps_per_save=20)
        server.wait_saved(job_id)
        pid = server.worker()
        server.stop()
        assert not is_running(pid)
        assert list((server.data / "jobs" / job_id).glob("step-*.json"))
        server.start()
        job = server.wait(job_id, "done", "failed")
        assert (value_of(job), job["attempt"]) == (expected(400), 2)


def test_nothing_is_left_of_a_job_that_is_done(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=30, steps_per_save=10)
        server.wait(job_id, "done")
        until(lambda: not (server.data / "jobs" / job_id).exists(), "its folder to be gone")
        assert list((server.data / "run").glob("j*.ctl")) == []


@pytest.mark.slow
def test_twenty_kills_at_random_change_nothing(tmp_path: Path) -> None:
    """Of the job, the parent, or both. Two processes at one job would refuse each other, and fail it."""
    chance, steps = random.Random(6), 12_000
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=steps, step_s=0.004, steps_per_save=25)
        kills = 0
        while kills < 20:
            saved = server.job(job_id)["checkpoint"] or {"step": 0}
            job = server.wait_saved(job_id, saved["step"] + 25 * chance.randrange(4))
            assert not job["ended_at"], job
            victim = chance.choice(["job", "parent", "both"])
            kills += 1
            pid = server.worker()
            if victim != "job":
                server.kill()
            if victim != "parent":
                kill(pid)
            if victim != "job":
                server.start()
        job = server.wait(job_id, "done", "failed", "lost", deadline_s=240)
        assert value_of(job) == expected(steps)
        assert steps_told(server, job_id) == set(range(25, steps + 1, 25))
