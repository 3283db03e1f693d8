"""The routes of jobs over real processes: submit, look, follow, pause, resume, retry, pin, delete."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import is_running, until
from tests.process.job_server import Frame, JobServer, expected, job_server, value_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    with job_server(tmp_path_factory.mktemp("jobs")) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/api/jobs", {}, 400, "kind: is missing"),
        ("POST", "/api/jobs", {"kind": "cuont"}, 400, "did you mean count?"),
        ("POST", "/api/jobs", {"kind": "quantise"}, 400, "did you mean quantize?"),
        ("POST", "/api/jobs", {"kind": 7}, 400, "kind: is missing"),
        ("POST", "/api/jobs", [1], 400, "a JSON object"),
        (
            "POST",
            "/api/jobs",
            {"kind": "count", "steps": "x", "stepps": 1},
            400,
            "steps: expected `int`, got `str`; stepps: there is no such field; did you mean steps?",
        ),
        ("POST", "/api/jobs", {"kind": "count", "name": "../x"}, 400, "cannot be the name of a count"),
        ("POST", "/api/jobs", {"kind": "count", "name": 3}, 400, "name: expected a text"),
        ("POST", "/api/jobs", {"kind": "finetune"}, 400, "model: is missing; data: is missing"),
        (
            "POST",
            "/api/jobs",
            {"kind": "finetune", "model": "nobody", "data": "/etc"},
            400,
            "is not below a folder of data sets",
        ),
        ("GET", "/api/jobs?state=dead", None, 400, "state must be one of queued,"),
        ("GET", "/api/jobs/job_x/log", None, 404, "no job job_x"),
        ("GET", "/api/jobs/job_x/stream", None, 404, "no job job_x"),
        ("GET", "/api/jobs/job_x/metrics?after=-1", None, 400, "after must be at least 0"),
        ("POST", "/api/jobs/job_x/pin", None, 404, "no job job_x"),
        ("POST", "/api/jobs/job_x/retry", None, 404, "no job job_x"),
        ("DELETE", "/api/jobs/job_x", None, 404, "no job job_x"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: JobServer, method: str, path: str, body: Any, status: int, says: str
) -> None:
    error = server.ask(method, path, status, **({"json": body} if body is not None else {}))["error"]
    assert says in error["message"]


def test_the_kinds_come_with_the_schema_of_their_forms(server: JobServer) -> None:
    kinds = {each["kind"]: each for each in server.ask("GET", "/api/jobs/kinds")["kinds"]}
    form = kinds["finetune"]["schema"]
    assert form["required"] == ["model", "data"]
    assert form["properties"]["data"]["x-names"] == "dataset"
    assert form["properties"]["rank"] == {"type": "integer", "minimum": 1, "maximum": 1024, "default": 8}
    assert {"model_id", "type"}.isdisjoint(form["properties"])
    assert (kinds["finetune"]["resumable"], kinds["noop"]["uses_gpu"]) == (True, False)


def test_an_output_gets_a_name_that_is_free_and_one_that_is_taken_is_a_conflict(server: JobServer) -> None:
    first = server.wait(server.submit(steps=1), "done")
    second = server.wait(server.submit(steps=1), "done")
    assert first["output_path"].endswith("/count")
    assert second["output_path"].endswith("/count-2")
    body = {"kind": "count", "name": "count"}
    assert (
        "exists; choose another name" in server.ask("POST", "/api/jobs", 409, json=body)["error"]["message"]
    )
    busy = server.submit(steps=100_000, step_s=0.01, name="busy")
    body = {"kind": "count", "name": "busy"}
    assert f"{busy} is at it already" in server.ask("POST", "/api/jobs", 409, json=body)["error"]["message"]
    server.say(busy, "cancel")
    server.wait(busy, "cancelled")


def test_a_second_job_for_the_gpu_says_whom_it_waits_for(server: JobServer) -> None:
    first = server.submit(steps=100_000, step_s=0.01)
    server.wait(first, "running")
    second = server.submit(steps=1)
    waits = until(lambda: server.job(second)["waits_for"], "why it waits")
    assert waits == f"{first}, which runs"
    third = server.submit("noop", steps=1)  # it needs no GPU
    server.wait(third, "done")
    found = [each["id"] for each in server.ask("GET", "/api/jobs?state=queued")["jobs"]]
    assert found == [second]
    server.say(first, "cancel")
    assert value_of(server.wait(second, "done")) == expected(1)


def test_a_paused_job_saves_where_it_is_and_goes_on_from_there(server: JobServer) -> None:
    job_id = server.submit(steps=300, step_s=0.005, steps_per_save=10_000)
    until(lambda: server.job(job_id)["done"] > 3, "some steps")
    server.say(job_id, "pause")
    job = server.wait(job_id, "paused")
    assert job["checkpoint"]["step"] > 3
    assert server.say(job_id, "resume")["job"]["status"] == "queued"
    job = server.wait(job_id, "done", "failed")
    assert (value_of(job), job["attempt"]) == (expected(300), 2)
    for word in ("pause", "resume", "cancel", "retry"):
        message = server.say(job_id, word, 409)["error"]["message"]
        assert f"{job_id} is done: there is nothing to {word}" in message


def test_cancel_in_every_state_ends_the_job_for_good(server: JobServer) -> None:
    blocks = server.submit(steps=100_000, step_s=0.01)
    queued = server.submit(steps=1)
    assert server.say(queued, "cancel")["job"]["status"] == "cancelled"
    server.say(blocks, "pause")
    server.say(blocks, "cancel")  # while it stops
    assert server.wait(blocks, "cancelled")["becomes"] is None
    paused = server.submit(steps=100_000, step_s=0.01)
    server.wait(paused, "running")
    server.say(paused, "pause")
    server.wait(paused, "paused")
    assert server.say(paused, "cancel")["job"]["status"] == "cancelled"
    starting = server.submit(steps=100_000, step_s=0.01)
    server.say(starting, "cancel")
    server.wait(starting, "cancelled")
    until(lambda: not (server.data / "jobs" / starting).exists(), "its folder to be gone")
    until(lambda: not server.workers(), "no process is left")


def test_a_job_that_failed_is_retried_by_a_new_one_from_its_checkpoint(server: JobServer) -> None:
    job_id = server.submit(steps=60, step_s=0.02, steps_per_save=10)
    server.wait_saved(job_id)
    checkpoint = server.job(job_id)["checkpoint"]["name"]
    server.say(job_id, "pause")
    server.wait(job_id, "paused")
    step = server.job(job_id)["checkpoint"]["name"]
    broken = server.data / "jobs" / job_id / step
    whole = broken.read_text()
    broken.write_text("[")
    server.say(job_id, "resume")
    job = server.wait(job_id, "failed")
    assert f"the checkpoint {step} cannot be read" in job["error"]["message"]
    broken.write_text(whole)
    new = server.say(job_id, "retry")["job"]
    assert (new["rerun_of"], new["checkpoint"]["name"]) == (job_id, step)
    assert checkpoint
    assert value_of(server.wait(new["id"], "done", "failed")) == expected(60)


def test_a_job_that_is_over_is_forgotten_unless_it_is_pinned(server: JobServer) -> None:
    job_id = server.submit(steps=100_000, step_s=0.01)
    server.wait(job_id, "running")
    assert "cancel it first" in server.ask("DELETE", f"/api/jobs/{job_id}", 409)["error"]["message"]
    server.say(job_id, "cancel")
    server.wait(job_id, "cancelled")
    assert server.say(job_id, "pin", 200)["job"]["pinned"] is True
    assert "take the pin away" in server.ask("DELETE", f"/api/jobs/{job_id}", 409)["error"]["message"]
    assert server.say(job_id, "unpin", 200)["job"]["pinned"] is False
    assert server.ask("DELETE", f"/api/jobs/{job_id}")["deleted"] is True
    server.ask("GET", f"/api/jobs/{job_id}", 404)


def test_the_log_and_the_metrics_are_paged(server: JobServer) -> None:
    job_id = server.submit(steps=50, steps_per_save=5)
    server.wait(job_id, "done")
    whole = server.events(job_id)
    assert [each["id"] for each in whole] == list(range(1, len(whole) + 1))
    page = server.ask("GET", f"/api/jobs/{job_id}/metrics?limit=4")
    assert [each["step"] for each in page["metrics"]] == [5, 10, 15, 20]
    assert page["more"] is True
    rest = server.ask("GET", f"/api/jobs/{job_id}/metrics?after={page['next']}&limit=1000")
    assert [each["step"] for each in rest["metrics"]] == list(range(25, 51, 5))
    assert rest["more"] is False


def test_a_stream_tells_everything_once_and_ends_with_the_job(server: JobServer) -> None:
    job_id = server.submit(steps=100, step_s=0.005, steps_per_save=10)
    frames = list(server.frames(job_id))
    assert (frames[-1].name, frames[-1].data["status"], frames[-1].id) == ("end", "done", None)
    told = [frame for frame in frames if frame.id is not None]
    assert [frame.id for frame in told] == list(range(1, len(told) + 1))
    assert [frame.data for frame in told] == server.events(job_id)
    assert {frame.name for frame in told} == {"state", "stage", "metric", "saved"}
    assert any(frame.name == "progress" for frame in frames)
    again = list(server.frames(job_id, last=told[3].id or 0))
    assert [frame.id for frame in again] == [*range(5, len(told) + 1), None]


def test_a_stream_goes_on_behind_the_last_event_across_a_kill_of_the_server(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=400, step_s=0.005, steps_per_save=10)
        got: list[Frame] = []
        with contextlib.closing(server.frames(job_id)) as frames:
            for frame in frames:
                got += [frame] if frame.id is not None else []
                if sum(each.name == "metric" for each in got) == 3:
                    break
        os.kill(server.process.pid, signal.SIGKILL)
        server.reap()
        server.start()
        last = got[-1].id or 0
        more = list(server.frames(job_id, last))
        assert more[-1].name == "end"
        got += [frame for frame in more if frame.id is not None]
        assert [frame.id for frame in got] == list(range(1, len(got) + 1))
        assert [frame.data["step"] for frame in got if frame.name == "metric"] == list(range(10, 401, 10))
        assert value_of(server.job(job_id)) == expected(400)


def test_a_server_that_leaves_ends_the_streams(tmp_path: Path) -> None:
    with job_server(tmp_path) as server:
        job_id = server.submit(steps=100_000, step_s=0.01)
        with contextlib.closing(server.frames(job_id)) as frames:
            next(frames)
            pid = server.worker()
            server.process.terminate()
            assert all(frame.name != "end" for frame in frames)
        server.reap()
        until(lambda: not is_running(pid), "its process to be gone")
