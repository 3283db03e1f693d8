"""Requests that never come whole, and what the log says of those that do."""

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.process.harness import DEADLINE_S, Served, chat, content, served, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


def connect(server: Served) -> socket.socket:
    found = urlsplit(server.url)
    return socket.create_connection((found.hostname, found.port), DEADLINE_S)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def lines(server: Served, event: str = "request.finished", count: int = 1) -> list[dict[str, object]]:
    """The log lines of a kind, once there are enough."""

    def found() -> list[dict[str, object]] | None:
        logged = [json.loads(line) for line in server.errors().splitlines() if f'"event":"{event}"' in line]
        return logged if len(logged) >= count else None

    return until(found, f"{count} log lines {event}")


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat", HEAD, b"\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he"]
)
def test_a_head_that_does_not_come_whole_ends_its_connection(tmp_path: Path, sent: bytes) -> None:
    with served(tmp_path, request_wait_s=0.3) as server, connect(server) as connection:
        connection.sendall(sent)
        first = b"HTTP/1.1 200 OK" if b"\r\n\r\n" in sent else b""
        assert rest(connection)[:15] == first


@pytest.mark.parametrize(
    "framing", [b"content-length: 1000\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_a_body_that_does_not_come_whole_is_answered_408_and_its_connection_closed(
    tmp_path: Path, framing: bytes
) -> None:
    with served(tmp_path, request_wait_s=0.3) as server, connect(server) as connection:
        connection.sendall(HEAD + framing)
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        assert lines(server)[0]["end"] == "request_timeout"


def test_a_request_that_came_whole_may_take_longer_than_that(tmp_path: Path) -> None:
    with served(tmp_path, {"ms_per_token": 60}, request_wait_s=0.3) as server:
        for _ in range(2):  # the second on a kept connection
            assert len(content(server.ask(stream=True).text).split()) == 12


def test_every_completion_has_one_line_in_the_log(tmp_path: Path) -> None:
    with served(tmp_path, {"ms_per_token": 5}) as server:
        server.wait_state("ready")
        server.http.post("/v1/chat/completions", json=chat("a b"), headers={"x-request-id": "mine"})
        server.http.post("/v1/chat/completions", json=chat("x", stream=True, max_tokens=3))
        server.http.post("/v1/chat/completions", json=chat("x", temperature=-1))
        server.http.post("/v1/chat/completions", json=chat('x fake:{"refuse":"template_failed"}'))
        with server.http.stream(
            "POST", "/v1/chat/completions", json=chat("x" + 'fake:{"tokens":100000}', stream=True)
        ) as answer:
            next(answer.iter_raw())
        logged = lines(server, count=5)
        server.http.get("/health")
        assert [line["end"] for line in logged] == [
            "stop",
            "length",
            "invalid_request",
            "template_failed",
            "left",
        ]
        assert [line["status"] for line in logged] == [200, 200, 400, 400, 499]
        first = logged[0]
        assert (first["request"], first["model"], first["stream"]) == ("mine", "org/fake-1b", False)
        assert (first["prompt_tokens"], first["tokens"]) == (3, 12)
        assert 0 < float(str(first["ttft_s"])) <= float(str(first["seconds"]))
        assert logged[1]["tokens"] == 3
        assert logged[2]["ttft_s"] is None


def test_an_upgrade_that_is_not_wanted_advertises_no_library_in_the_log(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        assert server.http.get("/health", headers=upgrade).status_code == 200
        assert server.ask().status_code == 200
        lines(server)
        assert "pgrade" not in server.errors()
        assert "WebSocket" not in server.errors()
