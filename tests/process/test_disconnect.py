"""Disconnect: clients that leave, and clients that are slow. Nobody else notices, the worker stops at once."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.harness import DEADLINE_S, Served, chat, content, served, until


def connect(server: Served, path: str, body: dict[str, object], *, buffer: int = 0) -> socket.socket:
    """A raw client that has sent its request."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(DEADLINE_S)
    client.connect((host, int(port)))
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(payload)}\r\n\r\n"
    client.sendall(head.encode() + payload)
    return client


LONG = {"tokens": 100_000, "ms_per_token": 5}


def test_a_disconnect_in_mid_stream_cancels_the_request_in_the_worker(tmp_path: Path) -> None:
    with served(tmp_path, LONG) as server:
        server.wait_state("ready")
        client = connect(server, "/v1/chat/completions", chat("x", stream=True))
        assert b"200 OK" in client.recv(4096)
        client.close()
        server.wait_journal("cancelled")
        until(lambda: server.engine()["in_flight"] == 0, "the place to be free")
        assert server.engine()["epoch"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_disconnect_of_a_request_that_is_not_streamed_cancels_it_too(tmp_path: Path, path: str) -> None:
    with served(tmp_path, LONG) as server:
        server.wait_state("ready")
        client = connect(server, path, chat("x") | {"prompt": "x"})
        server.wait_journal("request")
        client.close()
        server.wait_journal("cancelled")


def test_a_disconnect_before_the_first_event_cancels_the_prefill(tmp_path: Path) -> None:
    with served(tmp_path, {"prefill_ms": 60_000}) as server:
        server.wait_state("ready")
        client = connect(server, "/v1/chat/completions", chat("x", stream=True))
        server.wait_journal("request")
        client.close()
        server.wait_journal("cancelled")


def test_a_disconnect_while_the_model_loads_frees_the_place_and_asks_no_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 1500}) as server:
        client = connect(server, "/v1/chat/completions", chat("gone", stream=True))
        until(lambda: server.engine()["in_flight"] == 1, "the request to wait")
        client.close()
        until(lambda: server.engine()["in_flight"] == 0, "the place to be free")
        server.wait_state("ready")
        assert server.ask("still here").status_code == 200
        assert len(server.journal("request")) == 1


def test_a_disconnect_with_half_a_body_is_no_request(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{"
            )
        assert server.ask().status_code == 200
        assert "Traceback" not in server.errors()


def test_a_reader_that_does_not_read_stalls_nobody_else(tmp_path: Path) -> None:
    script = {"tokens": 2_000_000, "tokens_per_event": 2000}
    with served(tmp_path, script) as server:
        server.wait_state("ready")
        slow = connect(server, "/v1/chat/completions", chat("slow", stream=True), buffer=4096)
        server.wait_journal("request")
        with ThreadPoolExecutor(4) as threads:
            answers = list(
                threads.map(lambda n: server.ask(f'q {n} fake:{{"tokens":50}}', stream=True).text, range(4))
            )
        assert all(len(content(answer).split()) == 50 for answer in answers)
        assert not server.journal("cancelled")
        memory = until(lambda: _settled_rss(server), "the parent's memory to settle")
        assert memory < 80e6
        slow.close()
        server.wait_journal("cancelled")


def _settled_rss(server: Served) -> int | None:
    """Resident bytes of the parent, once the worker is held back: its counter stands still."""
    import psutil

    before = server.engine()["stats"]["tokens"]
    if server.http.get("/health").status_code != 200 or server.engine()["stats"]["tokens"] != before:
        return None
    return int(psutil.Process(server.process.pid).memory_info().rss)
