"""What one event costs on its way through the parent: `python -m tests.bench.wire`.

32 streams from the fake worker, one event per 20 ms each, all in one step, as an engine's rows are
(`--independent`: each at its own time, where every event wakes every process for itself).

- "parent": a whole server, from the worker's socket to the client's; CPU of the parent process alone.
- "blind proxy": a process that only copies bytes from socket to socket: what the reads, writes and wake-ups
  cost on this machine, whatever is done with the bytes.
- "reader …": only the parent's end of the data channel (read, parse, decode), with our client and, for
  comparison, with h11 and with httpx2.

Latency is from the moment the worker writes an event to the moment the client has read it (one machine, one
clock); worker, parent and load share its cores.
"""

import argparse
import asyncio
import json
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from parent.workers.client import WorkerClient
from parent.workers.states import Limits, State
from parent.workers.supervisor import Supervisor
from shared import control, ndjson, wire
from tests.process.harness import write_model

ROOT = Path(__file__).resolve().parents[2]
WORKER = [sys.executable, "-P", "-m", "tests.fakes.worker"]
_decode = msgspec.json.Decoder(wire.Event).decode
Latencies = list[float]


def main() -> None:
    """Run every row, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--ms", type=float, default=20.0)
    parser.add_argument("--independent", action="store_true", help="streams step each at its own time")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--proxy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        script = {"ms_per_token": options.ms, "tokens": options.tokens, "stamp": True}
        script["lockstep"] = not options.independent
        write_model(Path(folder), {"heartbeat_ms": 1000} | script, ("fake",))
        if options.reader:
            run = measure_reader(Path(folder), options.streams, READERS[options.reader])
            print(json.dumps(uvloop.run(run)))
            return
        if options.proxy:
            uvloop.run(blind_proxy(Path(options.proxy)))
            return
        rows = {
            "parent": measure_parent(Path(folder), options.streams),
            "blind proxy": measure_proxy(Path(folder), options.streams),
        }
    for reader in READERS:
        arguments = ["--reader", reader, "--streams", str(options.streams), "--tokens", str(options.tokens)]
        arguments += ["--ms", str(options.ms), *(["--independent"] if options.independent else [])]
        command = [sys.executable, "-m", "tests.bench.wire", *arguments]
        rows[f"reader {reader}"] = json.loads(subprocess.check_output(command, cwd=ROOT))
    print(f"{'':18} {'events':>8} {'CPU us/event':>13} {'p50 ms':>8} {'p99 ms':>8}")
    for name, row in rows.items():
        numbers = (
            f"{row['events']:8} {row['cpu_us_per_event']:13.1f} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f}"
        )
        print(f"{name:18} {numbers}")
    print(json.dumps(rows))


def summary(cpu_s: float, latencies: Latencies) -> dict[str, Any]:
    """One row."""
    ordered = sorted(latencies)
    return {
        "events": len(ordered),
        "cpu_us_per_event": cpu_s * 1e6 / len(ordered),
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
    }


# ---------------------------------------------------------------- the whole parent


def measure_parent(folder: Path, streams: int) -> dict[str, Any]:
    """CPU of the parent process while the clients read."""
    settings = {"data_dir": str(folder / "data"), "port": 0, "queue_limit": 256, "max_rows": streams}
    command = [sys.executable, "-m", "tests.process.serve_fake", json.dumps(settings), str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().decode().strip()
        try:
            return uvloop.run(_load(psutil.Process(parent.pid), int(url.rpartition(":")[2]), streams))
        finally:
            parent.terminate()


def measure_proxy(folder: Path, streams: int) -> dict[str, Any]:
    """CPU of a process that only copies bytes."""
    command = [sys.executable, "-m", "tests.bench.wire", "--proxy", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as proxy:
        assert proxy.stdout is not None
        port = int(proxy.stdout.readline())
        try:
            return uvloop.run(_load(psutil.Process(proxy.pid), port, streams, "/generate"))
        finally:
            proxy.terminate()


async def blind_proxy(folder: Path) -> None:
    """Copy what a client sends to a worker of our own and what it answers to the client."""
    loop = asyncio.get_running_loop()
    supervisor = await start_worker(folder)

    class Up(asyncio.Protocol):
        def __init__(self, down: asyncio.Transport) -> None:
            self.down = down

        def data_received(self, data: bytes) -> None:
            self.down.write(data)

        def connection_lost(self, exc: Exception | None) -> None:
            self.down.close()

    async def copy(down: asyncio.Transport, request: bytes) -> None:
        up, _ = await loop.create_unix_connection(lambda: Up(down), supervisor.socket_path)
        up.write(request)

    class Down(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.task = loop.create_task(copy(self.transport, data))

    server = await loop.create_server(Down, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _load(
    parent: psutil.Process, port: int, streams: int, path: str = "/v1/chat/completions"
) -> dict[str, Any]:
    await _client(port, path, "warm up fake:" + json.dumps({"tokens": 3, "ms_per_token": 0}))
    before = parent.cpu_times()
    gathered = await asyncio.gather(*(_client(port, path, f"stream {number}") for number in range(streams)))
    after = parent.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    row = summary(cpu_s, [each for latencies in gathered for each in latencies])
    return row | {"rss_mb": parent.memory_info().rss / 1e6}


async def _client(port: int, path: str, text: str) -> Latencies:
    """One streamed request; as cheap as can be, as it shares the cores with what is measured."""
    loop = asyncio.get_running_loop()
    asked: dict[str, Any] = {"stream": True, "messages": [{"role": "user", "content": text}]}
    if path == "/generate":
        asked = {"request_id": "r", "seed": 1, "prompt": {"type": "text", "text": text}}
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    transport, load = await loop.create_connection(_Load, "127.0.0.1", port)
    transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
    await load.ended
    transport.close()
    whole = b"".join(chunk for _, chunk in load.read)
    if b'"error"' in whole or b"usage" not in whole:
        raise SystemExit(f"the server says: {whole[-500:].decode()}")
    return [(arrived - int(stamp)) / 1e9 for arrived, chunk in load.read for stamp in _STAMP.findall(chunk)]


class _Load(asyncio.Protocol):
    """Keeps what it reads, and when; looks at it when all is over."""

    def __init__(self) -> None:
        self.read: list[tuple[int, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.read.append((time.monotonic_ns(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


_STAMP = re.compile(rb"(\d{10,}) ")


# ---------------------------------------------------------------- only the reader


Reader = Callable[[str, wire.GenerateRequest], AsyncIterator[list[wire.Event]]]
Maker = Callable[[str], Reader]


async def start_worker(folder: Path) -> Supervisor:
    """A ready fake worker of this process."""
    supervisor = Supervisor(
        control.LaunchModel(model_id="fake", path=str(folder)),
        command=WORKER,
        environment={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        runtime_dir=folder,
        limits=Limits(),
    )
    supervisor.want()
    while supervisor.state is not State.READY:
        await supervisor.changed()
    return supervisor


async def measure_reader(folder: Path, streams: int, maker: Maker) -> dict[str, Any]:
    """CPU of this process while it reads from a worker of its own."""
    supervisor = await start_worker(folder)
    read = maker(supervisor.socket_path)
    latencies: Latencies = []

    async def stream(number: int) -> None:
        request = wire.GenerateRequest(request_id=str(number), prompt=wire.TextPrompt(f"s {number}"), seed=1)
        async for events in read(supervisor.socket_path, request):
            now = time.monotonic_ns()
            for event in events:
                if isinstance(event, wire.Text):
                    latencies.append((now - int(event.text)) / 1e9)

    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*(stream(number) for number in range(streams)))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    supervisor.stop()
    await supervisor.absent()
    return summary(cpu_s, latencies)


def _ours(socket_path: str) -> Reader:
    client = WorkerClient(socket_path)

    async def read(_: str, request: wire.GenerateRequest) -> AsyncIterator[list[wire.Event]]:
        async with await client.generate(request) as stream:
            async for events in stream:
                yield events

    return read


def _httpx2(socket_path: str) -> Reader:
    import httpx2

    limits = httpx2.Limits(max_connections=None)
    client = httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=socket_path, limits=limits), timeout=None
    )

    async def read(_: str, request: wire.GenerateRequest) -> AsyncIterator[list[wire.Event]]:
        lines = ndjson.Lines()
        body = msgspec.json.encode(request)
        async with client.stream("POST", "http://worker/generate", content=body) as answer:
            async for chunk in answer.aiter_raw():
                yield [_decode(line) for line in lines.feed(chunk)]

    return read


def _h11(_: str) -> Reader:
    import h11

    async def read(socket_path: str, request: wire.GenerateRequest) -> AsyncIterator[list[wire.Event]]:
        body = msgspec.json.encode(request)
        connection = h11.Connection(h11.CLIENT)
        end = socket.socket(socket.AF_UNIX)
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(end, socket_path)
        headers = [("host", "worker"), ("content-length", str(len(body)))]
        head = h11.Request(method="POST", target="/generate", headers=headers)
        parts = (head, h11.Data(data=body), h11.EndOfMessage())
        await loop.sock_sendall(end, b"".join(connection.send(part) or b"" for part in parts))
        lines = ndjson.Lines()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await loop.sock_recv(end, 65536))
            elif isinstance(event, h11.Data):
                yield [_decode(line) for line in lines.feed(bytes(event.data))]
            elif isinstance(event, h11.EndOfMessage):
                end.close()
                return

    return read


READERS: dict[str, Maker] = {"httptools": _ours, "h11": _h11, "httpx2": _httpx2}

if __name__ == "__main__":
    main()
