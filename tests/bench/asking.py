"""Servers under test and how they are asked: over HTTP like a client, or a worker on its own socket."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator

from parent.workers.client import WorkerClient
from shared import wire

Row = dict[str, float]


class Server:
    """A server under test: its port, the name of its model there, its pid."""

    def __init__(self, port: int, model: str, pid: int) -> None:
        self.port, self.model, self.pid = port, model, pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], port: int, model: str) -> Iterator[Server]:
    """A server process from its start to when it listens, and its end."""
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{command} ended with {process.returncode}")
                time.sleep(0.01)
            yield Server(port, model, process.pid)
        finally:
            process.terminate()


def ask_http(port: int, model: str, prompt: str, tokens: int) -> Row:
    """One streamed chat answer, greedy."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }
    times: list[float] = []
    began = time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(chunk["error"])
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    times.append(time.perf_counter())
    return rate(began, times)


async def ask_worker(port: int, prompt: str, tokens: int) -> Row:
    """The same on the worker's own socket, past the parent."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/engine")
        path = json.loads(connection.getresponse().read())["socket"]
    client = WorkerClient(path)
    request = wire.GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt=wire.ChatPrompt([{"role": "user", "content": prompt}]),
        seed=0,
        sampling=wire.Sampling(temperature=0),
        max_tokens=tokens,
    )
    times: list[float] = []
    began = time.perf_counter()
    async with await client.generate(request) as stream:
        async for events in stream:
            times += [time.perf_counter() for event in events if isinstance(event, wire.Text)]
    client.close()
    return rate(began, times)


def rate(began: float, times: list[float]) -> Row:
    """A piece of text is a token here: the prompts are plain English, and nothing is held back."""
    if not times:
        raise SystemExit("an answer without text")
    spent = times[-1] - times[0]
    return {"ttft_s": times[0] - began, "decode_tps": (len(times) - 1) / spent if spent else 0.0}
