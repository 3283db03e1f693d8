"""Shutdown: signals to a real parent, and what is left of it and its worker."""

import signal
import subprocess
import threading
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.process.harness import (
    DEADLINE_S,
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


class Streaming(threading.Thread):
    """A client that streams beside the test."""

    def __init__(self, server: Served, text: str = "long", **fields: object) -> None:
        super().__init__()
        self.server, self.body = server, chat(text, stream=True, **fields)
        self.begun = threading.Event()
        self.received = ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx2.Client(base_url=self.server.url, timeout=DEADLINE_S, trust_env=False) as client,
                client.stream("POST", "/v1/chat/completions", json=self.body) as answer,
            ):
                for piece in answer.iter_text():
                    self.received += piece
                    self.begun.set()
        except httpx2.HTTPError as error:
            self.error = error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_lets_a_running_stream_finish_and_removes_what_was_made(
    tmp_path: Path, number: signal.Signals
) -> None:
    with served(tmp_path, {"tokens": 40, "ms_per_token": 20}) as server:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        server.process.send_signal(number)
        assert server.process.wait(DEADLINE_S) == 0
        stream.join()
        assert stream.received.endswith("data: [DONE]\n\n")
        assert len(content(stream.received).split()) == 40
        assert [entry["what"] for entry in server.journal("shutdown")] == ["shutdown"]
        assert left_in(tmp_path / "data") == set()


def test_shutdown_refuses_new_connections_and_answers_those_who_wait_for_a_load(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 60_000}) as server:
        server.wait_state("loading")
        stream = Streaming(server)
        until(lambda: server.engine()["in_flight"] == 1, "the request to wait")
        assert server.stop() == 0
        stream.join()
        assert "shutting down" in stream.received
        with pytest.raises(httpx2.ConnectError):
            server.ask()


def test_shutdown_cuts_a_stream_that_outlasts_the_drain(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 5000, "ms_per_token": 20}, drain_s=0.5) as server:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        assert server.stop() == 0
        stream.join()
        assert "[DONE]" not in stream.received
        assert frames(stream.received)[-1]["error"]["code"] == "shutting_down"


def test_a_second_signal_means_shutdown_now(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 5000, "ms_per_token": 20, "ignore_term": True}, drain_s=60) as server:
        worker = server.wait_state("ready")["pid"]
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "server.signal" in server.errors(), "the first signal to be seen")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10.0) == 128 + signal.SIGTERM
        stream.join()
        assert not is_running(worker)


def test_shutdown_kills_a_worker_that_ignores_every_request_to_leave(tmp_path: Path) -> None:
    script = {"ignore_term": True, "ignore_shutdown": True}
    with served(tmp_path, script, stop_grace_s=0.5) as server:
        worker = server.wait_state("ready")["pid"]
        assert server.stop() == 0
        assert not is_running(worker)
        assert '"code":-9' in server.errors()


def test_shutdown_ends_event_streams_at_once(tmp_path: Path) -> None:
    with served(tmp_path, {}, drain_s=60) as server:
        with server.http.stream("GET", "/admin/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            for _ in lines:
                pass
        assert server.process.wait(10.0) == 0


def test_shutdown_in_mid_load_leaves_no_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 60_000}) as server:
        worker = server.wait_state("loading")["pid"]
        assert server.stop() == 0
        assert not is_running(worker)


def test_two_servers_of_one_data_folder_are_refused_by_name(tmp_path: Path) -> None:
    with served(tmp_path) as server, start(tmp_path, {}, {}) as second:
        assert second.stdout is not None
        assert second.wait(DEADLINE_S) == 1
        message = server.errors().splitlines()[-1]
        assert f"process {server.process.pid} at {server.url}" in message
        assert server.http.get("/health").status_code == 200


def test_what_a_killed_server_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    with served(tmp_path, adopt_grace_s=0) as server:
        server.wait_state("ready")
        server.process.kill()
        server.process.wait()
        left = {path.name for path in (tmp_path / "data").iterdir()}
        assert left >= {"mlxd.lock", "run"}
    (tmp_path / "data" / "run" / "w-77.sock").write_text("stale")
    with served(tmp_path) as server:
        server.wait_state("ready")
        names = {path.name for path in (tmp_path / "data" / "run").iterdir()}
        assert "w-77.sock" not in names
        assert len([name for name in names if name.endswith(".sock")]) == 1


def test_a_stale_lock_file_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.lock").write_text(
        '{"pid": 999999999, "url": "http://127.0.0.1:1", "runtime": "/"}'
    )
    with served(tmp_path) as server:
        server.wait_state("ready")
        assert f'"pid":{server.process.pid}' in (tmp_path / "data" / "mlxd.lock").read_text()


def test_a_taken_port_names_its_owner_and_starts_no_worker(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        other = tmp_path / "other"
        other.mkdir()
        with start(other, {}, {"port": port}) as second:
            assert second.wait(DEADLINE_S) == 1
        message = (other / "stderr").read_text()
        assert f"port {port} on 127.0.0.1 is taken by process {server.process.pid} (python" in message
        assert "Traceback" not in message
        assert not (other / "model" / "journal.ndjson").exists()


def test_a_long_data_folder_gets_short_sockets_elsewhere_and_they_go_at_shutdown(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with served(deep) as server:
        socket_path = Path(server.wait_state("ready")["socket"])
        assert len(str(socket_path)) < 104
        assert socket_path.parent.stat().st_mode & 0o777 == 0o700
        assert socket_path.stat().st_mode & 0o777 == 0o600
        assert server.ask().status_code == 200
        assert server.stop() == 0
        assert not socket_path.parent.exists()


def test_the_worker_runs_in_its_own_session_and_inherits_no_listener(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        worker = psutil.Process(server.wait_state("ready")["pid"])
        assert not [each for each in worker.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        seen = subprocess.check_output(["ps", "-o", "sid=", "-p", str(worker.pid)], text=True)
        assert int(seen) == worker.pid
