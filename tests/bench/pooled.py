"""Servers with several models, real and fake, and a client that notes when the text came."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.e2e.real import serving
from tests.process.harness import Served

GB = 10**9
FAKE = "org/fake-1b"
T = TypeVar("T")
R = TypeVar("R")
QUIET = ("--hf-cache", "none")  # no models of the user in the library


class Answer(NamedTuple):
    """Seconds from the request: to the first text, and to the end."""

    text: str
    first_s: float
    total_s: float


class NoAnswer(Exception):
    """A status other than 200, an error frame, or a stream that just ended."""


class Client:
    """One kept connection. `key`: whose requests these are, for the fairness between clients."""

    def __init__(self, url: str, key: str = "") -> None:
        host, _, port = url.rpartition("/")[2].rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=300)
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(
        self, body: dict[str, Any], on_text: Callable[[], None] = lambda: None, request: str = ""
    ) -> Answer:
        """One stream, of a chat or (with `prompt`) of a text; `on_text` is called at every piece. `request`: its id
        in the log.

        Raises `NoAnswer`, or OSError and HTTPException of the connection.
        """
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        pieces: list[str] = []
        first = 0.0
        began = time.perf_counter()
        headers = self._headers | ({"x-request-id": request} if request else {})
        self._connection.request("POST", path, json.dumps(body | {"stream": True}).encode(), headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise NoAnswer(f"{answer.status}: {answer.read()[:300]!r}")
        is_whole = False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                is_whole = True
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                raise NoAnswer(str(frame["error"]))
            for choice in frame["choices"]:
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter()
                    pieces.append(piece)
                    on_text()
        if not is_whole:
            raise NoAnswer("the stream ended without its last frame")
        ended = time.perf_counter()
        return Answer("".join(pieces), (first or ended) - began, ended - began)

    def close(self) -> None:
        self._connection.close()


def ask(
    url: str, body: dict[str, Any], on_text: Callable[[], None] = lambda: None, request: str = ""
) -> Answer:
    """One stream on a connection of its own."""
    with contextlib.closing(Client(url)) as client:
        return client.ask(body, on_text, request)


def together(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """All at a time, in threads that a Ctrl-C does not wait for. `work` raises nothing, or its place is missing."""
    found: dict[int, R] = {}

    def one(number: int, item: T) -> None:
        found[number] = work(item)

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in sorted(found)]


def logged(server: Served, what: str) -> list[dict[str, Any]]:
    """The events of a name in the server's log, so far."""
    lines = (json.loads(line) for line in server.errors().splitlines() if f'"{what}"' in line)
    return [line for line in lines if line.get("event") == what]


def link_model(starter: Path, folder: Path) -> Path:
    """The model under another name: links to its files, and a card of its own."""
    folder.mkdir(parents=True)
    for file in starter.iterdir():
        if file.name != "mlxd.json":
            (folder / file.name).symlink_to(file)
    (folder / "mlxd.json").write_text(json.dumps({"name": folder.name}))
    return folder


@contextlib.contextmanager
def two_real(starter: Path, folder: Path) -> Iterator[Served]:
    """A server of the models `one` and `two`, with memory for one of them. The first start is only to ask for its
    needs; it finds the BLAS too.
    """
    models = folder / "data" / "models"
    one = link_model(starter, models / "one")
    link_model(starter, models / "two")
    with serving(one, folder, *QUIET) as server:
        fit = server.http.get("/admin/fit", params={"model": "two"}).raise_for_status().json()
    budget = fit["loads_with_bytes"] * 3 // 2
    with serving(one, folder, *QUIET, "--memory-budget-bytes", str(budget)) as server:
        server.wait_state("ready")
        yield server
