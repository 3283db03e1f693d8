"""What a restart in place hands over: connections that clients keep, and the place where it listens."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from parent import ports
from tests.process.harness import DEADLINE_S, ROOT, Served, chat, content, is_running, served, start, until
from tests.process.test_restart import begin, mlxd, oracle, status
from tests.process.test_shutdown import Streaming


class Kept:
    """One connection that is never made anew: where it is lost, so is the request."""

    def __init__(self, server: Served) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        self._connection.connect()
        self._connection.auto_open = 0
        self.socket: socket.socket = self._connection.sock

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, method: str, path: str, body: Any = None) -> None:
        self._connection.request(method, path, None if body is None else json.dumps(body))

    def answer(self) -> tuple[int, str]:
        found = self._connection.getresponse()
        return found.status, found.read().decode()

    def ask(self, text: str) -> str:
        self.send("POST", "/v1/chat/completions", chat(text, stream=True))
        code, body = self.answer()
        assert code == 200
        return content(body)


def test_clients_that_keep_their_connections_lose_no_request_over_restarts(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 3, "ms_per_token": 2}) as server:
        server.wait_state("ready")
        enough = threading.Event()

        def client(number: int) -> set[str]:
            answers = set()
            with Kept(server) as kept:
                while not enough.is_set():
                    answers.add(kept.ask(f"q {number}"))
            return answers

        with ThreadPoolExecutor(20) as threads:
            clients = [threads.submit(client, number) for number in range(20)]
            try:
                for _ in range(5):
                    assert mlxd(server).returncode == 0
            finally:
                enough.set()
        for number, each in enumerate(clients):
            assert each.result() == {oracle(f"q {number}", 3)}
    assert len(server.journal("spawned")) == 1


@contextlib.contextmanager
def draining(server: Served) -> Any:
    """A restart that waits for one answer."""
    stream = Streaming(server)
    assert stream.begun.wait(DEADLINE_S)
    assert begin(server).status_code == 202
    yield
    stream.join()
    assert content(stream.received) == oracle("long", 60)


SLOW = {"tokens": 60, "ms_per_token": 25}


def test_what_is_sent_on_a_kept_connection_in_a_restart_is_answered_by_the_next(tmp_path: Path) -> None:
    with served(tmp_path, SLOW) as server, Kept(server) as fresh, Kept(server) as used:
        server.wait_state("ready")
        used.send("GET", "/admin/restart")
        before = json.loads(used.answer()[1])["boot"]
        with draining(server):
            for kept in (fresh, used):
                kept.send("GET", "/admin/restart")
        for kept in (fresh, used):
            code, body = kept.answer()
            assert code == 200
            assert json.loads(body)["boot"] != before
        assert used.ask("x") == oracle("x", 60)


def test_a_request_that_has_begun_is_answered_before_a_restart(tmp_path: Path) -> None:
    with served(tmp_path, SLOW) as server, Kept(server) as kept:
        server.wait_state("ready")
        boot = status(server)["boot"]
        kept.socket.sendall(b"GET /admin/restart HTTP/1.1\r\nhost: local")
        with draining(server):
            kept.socket.sendall(b"host\r\n\r\n")
            answer = http.client.HTTPResponse(kept.socket)
            answer.begin()
            assert json.loads(answer.read())["boot"] == boot
        assert kept.ask("x") == oracle("x", 60)


def test_half_a_request_without_the_rest_does_not_keep_a_restart_waiting(tmp_path: Path) -> None:
    with served(tmp_path) as server, Kept(server) as kept:
        server.wait_state("ready")
        kept.socket.sendall(b"GET /admin/restart HTTP/1.1\r\nhost: local")
        assert mlxd(server).returncode == 0
        with contextlib.suppress(ConnectionResetError):
            assert kept.socket.recv(1) == b""


def test_kept_connections_go_on_after_a_restart_that_was_given_up(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 60, "hold_after": 5}, drain_s=0.4) as server, Kept(server) as kept:
        server.wait_state("ready")
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        assert begin(server).status_code == 202
        kept.send("GET", "/admin/restart")
        code, body = kept.answer()
        assert (code, json.loads(body)["state"]) == (200, "given_up")
        (server.model_dir / "release").touch()
        stream.join()


def test_answers_that_a_client_is_slow_to_read_are_whole_whichever_image_gives_them(tmp_path: Path) -> None:
    count = 400
    with served(tmp_path) as server, Kept(server) as kept:
        server.wait_state("ready")
        boot = status(server)["boot"]
        request = b"GET /admin/config HTTP/1.1\r\nhost: localhost\r\n\r\n"
        sender = threading.Thread(target=lambda: kept.socket.sendall(request * count))
        sender.start()
        assert begin(server).status_code == 202
        with kept.socket.makefile("rb") as received:
            for _ in range(count):
                head = b"".join(iter(received.readline, b"\r\n"))
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert json.loads(received.read(length))["pending"] == {}
        sender.join()
        until(lambda: status(server)["boot"] != boot, "the restart")
        assert kept.ask("x") == oracle("x")


# ---------------------------------------------------------------- where it listens


def free_port() -> int:
    with contextlib.closing(ports.bind("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def patch(server: Served, **values: Any) -> list[dict[str, Any]]:
    answer = server.http.patch("/admin/config", json=values)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def config(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{url}/admin/config", timeout=DEADLINE_S, trust_env=False).json()
    return found


def at_port(tmp_path: Path, port: int) -> Any:
    """A server whose port is in the file, so that it can be changed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text(f"port = {port}\n")
    return served(tmp_path, port=None)


@pytest.mark.parametrize("how", ["port", "host", "by hand"])
def test_a_restart_moves_to_the_place_that_the_settings_say_now(tmp_path: Path, how: str) -> None:
    old, new = free_port(), free_port()
    with at_port(tmp_path, old) as server, Kept(server) as kept:
        worker = server.wait_state("ready")["pid"]
        if how == "by hand":
            (server.data_dir / "mlxd.toml").write_text(f"port = {new}\n")
        else:
            patch(server, **({"port": new} if how == "port" else {"host": "localhost"}))
            assert set(config(server.url)["pending"]) == {how}
        moved = f"http://localhost:{old}" if how == "host" else f"http://127.0.0.1:{new}"
        done = mlxd(server)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"restarted: {moved} (pid {server.process.pid})" in done.stdout
        assert json.loads((server.data_dir / "mlxd.lock").read_text())["url"] == moved
        found = config(moved)
        assert found["pending"] == {}
        assert f"http://{found['values']['host']}:{found['values']['port']}" == moved
        if how != "host":
            with pytest.raises(httpx2.ConnectError):
                config(server.url)
        kept.send("GET", "/engine")
        code, body = kept.answer()
        assert (code, json.loads(body)["pid"]) == (200, worker)


def test_a_restart_to_a_port_that_is_taken_is_refused_and_the_port_stays_pending(tmp_path: Path) -> None:
    with at_port(tmp_path, free_port()) as server, contextlib.closing(ports.bind("127.0.0.1", 0)) as taken:
        server.wait_state("ready")
        port = taken.getsockname()[1]
        patch(server, port=port)
        refused = mlxd(server)
        assert refused.returncode == 1
        assert f"port {port} on 127.0.0.1 is taken" in refused.stderr
        assert config(server.url)["pending"] == {"port": port}
        assert server.ask().status_code == 200


# ---------------------------------------------------------------- settings that are in force at once


def test_a_changed_drain_is_the_bound_of_the_next_restart_and_of_the_stop(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 60, "hold_after": 5}) as server:
        server.wait_state("ready")
        patch(server, drain_s=0.3)
        stream = Streaming(server)
        assert stream.begun.wait(DEADLINE_S)
        assert "after 0.3 s" in mlxd(server).stderr
        assert server.stop(DEADLINE_S / 2) == 0  # half of what was the bound before
        stream.join()
        assert "shutting_down" in stream.received


@pytest.mark.parametrize(
    ("method", "path"), [("PATCH", "/admin/config"), ("POST", "/admin/restart"), ("POST", "/admin/pulls")]
)
def test_a_changed_patience_is_that_of_the_next_request(tmp_path: Path, method: str, path: str) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(tmp_path))
        patch(server, request_wait_s=0.3)
        head = stack.enter_context(Kept(server))
        head.socket.sendall(b"GET /health HT")
        with contextlib.suppress(ConnectionResetError):
            assert head.socket.recv(1) == b""
        body = stack.enter_context(Kept(server))
        body.socket.sendall(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "content-length: 9\r\n\r\n{".encode()
        )
        answer = http.client.HTTPResponse(body.socket)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "request_timeout")


# ---------------------------------------------------------------- a lock file that somebody removes


def test_a_live_server_puts_its_lock_file_back(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        worker = server.wait_state("ready")["pid"]
        lock = server.data_dir / "mlxd.lock"
        owner = lock.read_text()
        lock.unlink()
        until(lambda: lock.exists() and lock.read_text() == owner, "the lock file is back")
        with start(tmp_path, {}, {}) as second:
            assert second.wait(DEADLINE_S) == 1
        assert f"served already by process {server.process.pid}" in server.errors()
        lock.unlink()
        assert begin(server).status_code == 202
        until(lambda: lock.exists() and json.loads(lock.read_text())["url"] == server.url, "it is announced")
        assert server.engine()["pid"] == worker


@pytest.mark.parametrize("adopted", [False, True])
def test_workers_of_a_live_server_are_not_left_over_though_its_lock_file_has_gone(
    tmp_path: Path, adopted: bool
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(tmp_path))
        worker = server.wait_state("ready")["pid"]
        if adopted:  # the parent of its process is somebody else then
            server.process.kill()
            server.process.wait(DEADLINE_S)
            server = stack.enter_context(served(tmp_path))
            assert server.wait_state("ready")["pid"] == worker
        server.process.send_signal(signal.SIGSTOP)  # it cannot put it back
        lock = server.data_dir / "mlxd.lock"
        lock.unlink()
        with start(tmp_path, {}, {}) as second:
            assert second.wait(DEADLINE_S) == 1
        assert (
            f"served already by process {server.process.pid}, whose lock file was removed" in server.errors()
        )
        assert is_running(worker)
        server.process.send_signal(signal.SIGCONT)
        until(lambda: lock.exists() and f'"{server.url}"' in lock.read_text(), "the lock file is back")
        assert server.ask().status_code == 200
        assert server.engine()["pid"] == worker


def test_a_signal_that_comes_in_mid_exec_waits_for_the_new_image() -> None:
    """Before it has handlers a signal would end it at once, without an end for anybody."""
    becoming = (
        "import os, signal\n"
        "from parent import handover, ports\n"
        "here = ports.Listener('127.0.0.1', 0)\n"
        "tell = 'import os, signal; os.kill(os.getpid(), signal.SIGTERM); print(signal.sigpending())'\n"
        "handover.command = lambda: ['python', '-c', tell]\n"
        "handover.execute(here, os.open(os.devnull, os.O_RDONLY))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", becoming],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, "SIGTERM" in done.stdout) == (0, True), done.stderr
