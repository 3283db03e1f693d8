"""A server of jobs for tests, with real processes under it, and what tests ask of it and do to it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil

from tests.process.harness import ROOT, is_running, until
from worker.jobs.count import after


class Frame(NamedTuple):
    """One server-sent event."""

    id: int | None
    name: str
    data: dict[str, Any]


class JobServer:
    """`tests.process.serve_jobs` on `folder/data`; a job's process works on for `grace_s` without it."""

    def __init__(self, folder: Path, grace_s: float = 30.0, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.env = {**os.environ, **(env or {}), "GRACE": str(grace_s)}
        self.process: subprocess.Popen[str]
        self.http: httpx2.Client
        self.seen: set[int] = set()  # the processes of jobs
        self.start()

    def start(self) -> None:
        with open(self.folder / "stderr", "a") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.serve_jobs", str(self.data)],
                cwd=ROOT,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        assert url, (self.folder / "stderr").read_text()
        self.http = httpx2.Client(base_url=url, timeout=30.0, trust_env=False)

    def kill(self) -> None:
        """SIGKILL to the server alone."""
        self._ended(signal.SIGKILL)

    def stop(self) -> None:
        self._ended(signal.SIGTERM)

    def _ended(self, number: signal.Signals) -> None:
        self.workers()
        self.process.send_signal(number)
        self.reap()

    def reap(self) -> None:
        """It has been told to end."""
        self.process.wait(30)
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> dict[str, Any]:
        answer = self.http.request(method, path, **options)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def submit(self, kind: str = "count", **fields: Any) -> str:
        """The id of a new job."""
        body = {"kind": kind, "spec": fields}
        return str(self.ask("POST", "/api/jobs", 202, json=body)["job"]["id"])

    def say(self, job_id: str, word: str, status: int = 202) -> dict[str, Any]:
        return self.ask("POST", f"/api/jobs/{job_id}/{word}", status)

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/api/jobs/{job_id}")["job"])

    def wait(self, job_id: str, *statuses: str, deadline_s: float = 30.0) -> dict[str, Any]:
        return until(
            lambda: found if (found := self.job(job_id))["status"] in statuses else None,
            f"{job_id} to be {' or '.join(statuses)}, not {self.job(job_id)}",
            deadline_s,
        )

    def wait_saved(self, job_id: str, beyond: int = 0) -> dict[str, Any]:
        """Once a checkpoint behind that step is in the row, or the job is over."""

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            step = (job["checkpoint"] or {"step": 0})["step"]
            return job if step > beyond or job["ended_at"] else None

        return until(look, f"a checkpoint behind step {beyond}")

    def workers(self) -> list[int]:
        """The processes of jobs that live, adopted ones too."""
        rows = self._rows("SELECT worker FROM jobs WHERE worker != ''")
        pids = [int(json.loads(row[0])["pid"]) for row in rows]
        self.seen |= set(pids)
        return [pid for pid in pids if is_running(pid)]

    def worker(self) -> int:
        """The one process."""
        (pid,) = until(self.workers, "the process of the job")
        return pid

    def _rows(self, query: str) -> list[Any]:
        import sqlite3

        with contextlib.closing(sqlite3.connect(self.data / "mlxd.sqlite", timeout=30)) as db:
            return db.execute(query).fetchall()

    def events(self, job_id: str, kind: str = "") -> list[dict[str, Any]]:
        """All that the job told, through the pages of its log."""
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {"next": 0, "more": True}
        while page["more"]:
            page = self.ask("GET", f"/api/jobs/{job_id}/log?after={page['next']}&limit=100")
            found += page["events"]
        return [each for each in found if not kind or each["type"] == kind]

    def frames(self, job_id: str, last: int = 0) -> Generator[Frame, None, None]:
        """The stream of a job from `Last-Event-ID` on, until it ends or the server does."""
        headers = {"Last-Event-ID": str(last)} if last else {}
        with self.http.stream("GET", f"/api/jobs/{job_id}/stream", headers=headers) as answer:
            assert answer.status_code == 200
            fields: dict[str, str] = {}
            with contextlib.suppress(httpx2.HTTPError):  # the server was killed
                for line in answer.iter_lines():
                    if line:
                        name, _, value = line.partition(": ")
                        fields[name] = value
                    elif "event" in fields:
                        number = int(fields["id"]) if "id" in fields else None
                        yield Frame(number, fields["event"], json.loads(fields["data"]))
                        fields = {}


def expected(steps: int) -> int:
    """What an undisturbed count comes to."""
    value = 1
    for step in range(1, steps + 1):
        value = after(value, step)
    return value


def value_of(job: dict[str, Any]) -> int:
    """What a count came to."""
    assert job["status"] == "done", job
    return int(json.loads((Path(job["output_path"]) / "count.json").read_text())["value"])


@contextlib.contextmanager
def job_server(folder: Path, grace_s: float = 30.0) -> Iterator[JobServer]:
    """Afterwards neither it nor a process that it knew is there."""
    server = JobServer(folder, grace_s)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        for pid in server.seen:
            with contextlib.suppress(psutil.Error):
                until(lambda pid=pid: not is_running(pid), f"process {pid} to be gone", grace_s + 10.0)
