"""Pulls as jobs of a server: over HTTP and with `mlxd pull`, paused, resumed, and killed in the middle."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parent.config import Settings
from parent.library.library import Library
from tests.fakes.hub import Hub, git_hash
from tests.process.harness import ROOT, is_running, until
from tests.process.job_server import JobServer
from tests.process.pulling import NEEDED, REPO, WEIGHTS, cache_of, content_of, environment, files, part_of


class Server(JobServer):
    """A server of jobs over a cache in `folder`; what it pulls ends with it."""

    def __init__(self, folder: Path, hub_url: str, **more: str) -> None:
        super().__init__(folder, 0.0, {**environment(hub_url, folder), **more})

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it; its workers are gone with it."""
        workers = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        self.reap()
        until(lambda: not [pid for pid in workers if is_running(pid)], "no worker left behind")

    def pull(self, model: str = REPO) -> str:
        """The id of the job."""
        return str(self.ask("POST", "/admin/pulls", 202, json={"model": model})["job"]["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/admin/pulls/{job_id}")["job"])


@contextlib.contextmanager
def serving(folder: Path, hub: Hub, **more: str) -> Iterator[Server]:
    server = Server(folder, hub.url, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def held(hub: Hub, folder: Path) -> Path:
    """The half file, once the hub has sent half and waits."""
    assert hub.held.wait(30)
    part = until(lambda: part_of(folder), "a part of the weights")
    until(lambda: part.stat().st_size > 250_000, "what was sent is on the disk")
    return part


def test_a_pull_is_a_job_that_ends_with_the_snapshot(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        job_id = server.pull()
        job = server.wait(job_id, "done", "failed")
        assert job["status"] == "done", job
        assert (job["model"], job["kind"], job["progress"], job["error"]) == (REPO, "pull", 1.0, None)
        assert content_of(Path(job["output_path"]))[WEIGHTS] == files()[WEIGHTS]
        size = sum(len(files()[path]) for path in NEEDED)
        assert (job["done"], job["total"]) == (size, size)
        assert server.ask("GET", "/api/jobs?limit=5&kind=pull", 200)["jobs"][0]["id"] == job_id
        assert server.ask("GET", "/api/jobs?kind=noop", 200) == {"ok": True, "jobs": []}
        assert server.ask("GET", f"/api/jobs/{job_id}", 200)["job"]["status"] == "done"
        assert [each["id"] for each in server.ask("GET", "/admin/pulls", 200)["jobs"]] == [job_id]


def deaths(folder: Path) -> int:
    """Of servers under the one job, as far as they count against it."""
    with contextlib.closing(sqlite3.connect(folder / "data" / "mlxd.sqlite")) as db:
        return int(db.execute("SELECT orphaned FROM jobs").fetchone()[0])


def test_a_parent_killed_in_the_middle_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        part = held(hub, tmp_path)
        server.end(signal.SIGKILL)
        here = part.stat().st_size
        sent = hub.sent[WEIGHTS]
        hub.hold.clear()
        server.start()
        job = server.wait(job_id, "done", "failed")
        assert (job["status"], job["attempt"]) == ("done", 2)
        assert deaths(tmp_path) == 0  # it got further: the death is not held against it
        assert content_of(Path(job["output_path"]))[WEIGHTS] == files()[WEIGHTS]
        assert hub.starts(WEIGHTS) == [0, here]
        assert hub.sent[WEIGHTS] - sent <= len(files()[WEIGHTS]) - here + 200_000
        assert hub.starts("tokenizer.json") == [0]


def test_a_server_that_is_stopped_goes_on_with_it_when_started_again(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        part = held(hub, tmp_path)
        server.end()
        here = part.stat().st_size
        hub.hold.clear()
        server.start()
        assert server.wait(job_id, "done", "failed")["status"] == "done"
        assert hub.starts(WEIGHTS) == [0, here]


def test_pause_holds_across_a_restart_and_resume_goes_on(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        part = held(hub, tmp_path)
        answer = server.ask("POST", f"/admin/pulls/{job_id}/pause", 202)["job"]
        assert answer["status"] == "paused" or answer["becomes"] == "paused"
        server.wait(job_id, "paused")
        here = part.stat().st_size
        hub.hold.clear()
        server.end()
        server.start()
        assert server.job(job_id)["status"] == "paused"
        server.ask("POST", f"/admin/pulls/{job_id}/resume", 202)
        assert server.wait(job_id, "done", "failed")["status"] == "done"
        assert hub.starts(WEIGHTS) == [0, here]


def test_asking_again_resumes_what_is_paused_and_names_what_runs(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        held(hub, tmp_path)
        for model in (REPO, f"{REPO}@v1", REPO.upper()):
            error = server.ask("POST", "/admin/pulls", 409, json={"model": model})["error"]
            assert job_id in error["message"]
            assert error["code"] == "conflict"
        server.ask("POST", f"/admin/pulls/{job_id}/pause", 202)
        server.wait(job_id, "paused")
        hub.hold.clear()
        server.ask("POST", "/admin/pulls", 409, json={"model": f"{REPO}@v1"})
        assert server.pull() == job_id
        server.wait(job_id, "done")
        assert server.pull() != job_id


def test_a_paused_pull_whose_revision_has_moved_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        held(hub, tmp_path)
        server.ask("POST", f"/admin/pulls/{job_id}/pause", 202)
        server.wait(job_id, "paused")
        assert list(cache_of(tmp_path).rglob("*.incomplete"))
        hub.hold.clear()
        hub.repos[REPO] = {**files(), WEIGHTS: files(700_000)[WEIGHTS]}
        server.ask("POST", f"/admin/pulls/{job_id}/resume", 202)
        server.wait(job_id, "done")
        assert not list(cache_of(tmp_path).rglob("*.incomplete"))


def test_cancel_ends_the_job_and_keeps_what_is_verified(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        held(hub, tmp_path)
        server.ask("DELETE", f"/admin/pulls/{job_id}", 202)
        job = server.wait(job_id, "cancelled")
        assert job["ended_at"] is not None
        assert (cache_of(tmp_path) / "blobs" / git_hash(files()["tokenizer.json"])).exists()
        assert not (cache_of(tmp_path) / "snapshots").exists()
        until(lambda: not list(cache_of(tmp_path).rglob("*.incomplete")), "the half file to be gone")
        assert not (cache_of(tmp_path) / ".mlxd-parts").exists()
        assert server.ask("DELETE", f"/admin/pulls/{job_id}", 409)["error"]["code"] == "conflict"
        assert server.ask("POST", f"/admin/pulls/{job_id}/resume", 409)["error"]["code"] == "conflict"


def test_a_lost_network_is_tried_again_and_again_while_something_comes(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.drop[WEIGHTS] = [50_000, 0] * 4  # each try brings a little, then fails
        job = server.wait(server.pull(), "done", "failed")
        assert job["status"] == "done", job["error"]
        assert job["attempt"] == 5  # more than the three that may bring nothing
        assert content_of(Path(job["output_path"]))[WEIGHTS] == files()[WEIGHTS]
        starts = hub.starts(WEIGHTS)
        assert starts == sorted(starts)


def test_a_network_that_brings_nothing_is_given_up_with_its_reason(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.drop[WEIGHTS] = [100_000] + [0] * 99
        job = server.wait(server.pull(), "done", "failed")
        assert (job["status"], job["error"]["code"]) == ("failed", "hub")
        assert hub.url in job["error"]["message"]
        assert job["attempt"] == 4  # one that brought something, three that did not


@pytest.mark.parametrize(
    ("sin", "code", "says"),
    [
        ({"spoil": {WEIGHTS: 9}}, "hub", "came twice with another hash"),
        ({"statuses": [(403, {})]}, "hub", "refuses"),
    ],
)
def test_what_does_not_get_better_is_not_tried_again(
    tmp_path: Path, sin: dict[str, Any], code: str, says: str
) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        for name, value in sin.items():
            setattr(hub, name, value)
        job = server.wait(server.pull(), "done", "failed")
        assert (job["status"], job["error"]["code"], job["attempt"]) == ("failed", code, 1)
        assert says in job["error"]["message"]


def test_a_full_disk_fails_with_the_numbers(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub, FLOOR=str(1 << 60)) as server:
        job = server.wait(server.pull(), "done", "failed")
        assert job["error"]["code"] == "disk_full"
        assert "605 kB to download" in job["error"]["message"]


def test_the_token_of_the_server_is_in_no_row_log_or_answer(tmp_path: Path) -> None:
    token = "hf_secretsecretsecret"
    with Hub({REPO: files()}, token=token) as hub, serving(tmp_path, hub, HF_TOKEN=token) as server:
        hub.statuses = [(403, {"x-error-message": f"token {token} is not allowed"})]
        failed = server.wait(server.pull(), "failed", "done")
        assert "is not allowed" in failed["error"]["message"]
        done = server.wait(server.pull(), "failed", "done")
        assert done["status"] == "done"
        answers = server.http.get("/api/jobs").text
        server.end()
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"mlxd.sqlite", "stderr"} <= {file.name for file in kept}
    assert token not in answers
    assert [file for file in kept if token.encode() in file.read_bytes()] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/admin/pulls", b"{}", 400, "the body must be"),
        ("POST", "/admin/pulls", b"\xff", 400, "the body must be"),
        ("POST", "/admin/pulls", b'{"model": "starter"}', 400, "write ORG/NAME"),
        ("POST", "/admin/pulls", b'{"model": "../../etc"}', 400, "write ORG/NAME"),
        ("POST", "/admin/pulls", b'{"model": "' + b"a" * 70_000 + b'"}', 413, "limit"),
        ("GET", "/admin/pulls/job_x", b"", 404, "no job job_x"),
        ("DELETE", "/admin/pulls/job_x", b"", 404, "no job job_x"),
        ("GET", "/api/jobs/job_x", b"", 404, "no job job_x"),
        ("GET", "/api/jobs?limit=0", b"", 400, "limit must be 1 to 1000"),
        ("GET", "/api/jobs?limit=99999999999999", b"", 400, "limit must be"),
        ("GET", "/api/jobs?limit=x", b"", 400, "limit must be"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    shared_server: Server, method: str, path: str, body: bytes, status: int, says: str
) -> None:
    assert says in shared_server.ask(method, path, status, content=body)["error"]["message"]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Hub({}) as hub, serving(tmp_path_factory.mktemp("shared"), hub) as server:
        yield server


# ---------------------------------------------------------------- mlxd pull


def command(server: Server | None, folder: Path, hub: Hub, model: str = REPO) -> "subprocess.Popen[str]":
    env = server.env if server else {**os.environ, **environment(hub.url, folder)}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "parent",
            "pull",
            model,
            "--data-dir",
            str(folder / "data"),
            "--disk-floor-bytes",
            "0",
        ],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("served", [False, True])
def test_the_command_pulls_with_and_without_a_server(tmp_path: Path, served: bool) -> None:
    with Hub({REPO: files()}) as hub, contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, hub)) if served else None
        out, err = command(server, tmp_path, hub).communicate(timeout=60)
        snapshot = cache_of(tmp_path) / "snapshots" / hub.commit(REPO)
        assert out.splitlines()[-1] == f"{REPO} is ready: {snapshot}"
        assert "5 files, 605 kB" in out
        assert "download     100 %" in err or served
        assert content_of(snapshot)[WEIGHTS] == files()[WEIGHTS]
        if server:
            assert [job["status"] for job in server.ask("GET", "/admin/pulls", 200)["jobs"]] == ["done"]


@pytest.mark.parametrize("served", [False, True])
def test_the_command_tells_the_id_under_which_the_model_is_listed(tmp_path: Path, served: bool) -> None:
    with Hub({REPO: files(1000)}) as hub, contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, hub)) if served else None
        commit = hub.commit(REPO)
        settings = Settings(data_dir=tmp_path / "data", hf_cache=str(tmp_path / "cache"))
        library = Library(lambda: settings, dict)
        for asked, listed in (
            (f"{REPO}@{commit}", f"{REPO}@{commit[:8]}"),
            (f"{REPO}@v1", f"{REPO}@v1"),
            (REPO, REPO),
            (f"{REPO}@v1", REPO),  # the same commit, which main points to
        ):
            out, err = command(server, tmp_path, hub, asked).communicate(timeout=60)
            assert out.splitlines()[-1].startswith(f"{listed} is ready: "), err
            library.scan()
            assert [entry.id for entry in library.entries] == [listed]
            assert library.resolve(asked).entry.id == listed


@pytest.mark.parametrize("served", [False, True])
def test_ctrl_c_pauses_the_command_and_the_same_command_goes_on(tmp_path: Path, served: bool) -> None:
    with Hub({REPO: files()}) as hub, contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, hub)) if served else None
        hub.hold[WEIGHTS] = 300_000
        child = command(server, tmp_path, hub)
        part = held(hub, tmp_path)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out) == (130, "")
        assert err.splitlines()[-1] == f"mlxd: paused; `mlxd pull {REPO}` goes on where it was"
        if server:
            (job,) = server.ask("GET", "/admin/pulls", 200)["jobs"]
            server.wait(job["id"], "paused")
        here = part.stat().st_size
        hub.hold.clear()
        child = command(server, tmp_path, hub)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert hub.starts(WEIGHTS) == [0, here]


@pytest.mark.parametrize("served", [False, True])
def test_the_command_fails_with_the_reason_in_one_line(tmp_path: Path, served: bool) -> None:
    with Hub({REPO: files()}) as hub, contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, hub)) if served else None
        child = command(server, tmp_path, hub, "org/none")
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out) == (1, "")
        assert (
            err
            == f"mlxd: {hub.url} has no model org/none, or it is private: check its name, or set HF_TOKEN to see it\n"
        )


def test_a_second_command_joins_the_pull_that_runs(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        first = command(server, tmp_path, hub)
        held(hub, tmp_path)
        second = command(server, tmp_path, hub)
        assert second.stderr is not None
        assert "is at it already" in second.stderr.readline()
        hub.release.set()
        for child in (first, second):
            out, _ = child.communicate(timeout=60)
            assert "is ready" in out
        assert len(server.ask("GET", "/admin/pulls", 200)["jobs"]) == 1
