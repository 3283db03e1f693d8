"""The data channel's client against a scripted socket: cuts at every byte, back-pressure, reuse, loss."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from parent.workers.client import MAX_IDLE, WorkerClient, WorkerLost
from parent.workers.connection import HIGH_WATER
from shared import ndjson, wire
from shared.errors import ErrorCode, Failure, Refused

REQUEST = wire.GenerateRequest(request_id="r", prompt=wire.TextPrompt("x"), seed=1)
FINISH = wire.Finish("stop", wire.Usage(1, 2))
EVENTS: list[wire.Event] = [wire.Started(1), wire.Text("a", [1]), wire.Text("東", [2]), FINISH]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


ANSWER = HEAD + b"".join(chunked(ndjson.encode(event)) for event in EVENTS) + END


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """One request, whole. Raises IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head + await reader.readexactly(length)


@asynccontextmanager
async def worker(tmp_path: Path, script: Script) -> AsyncIterator[WorkerClient]:
    """A client of a worker whose connections run `script`."""
    path = str(tmp_path / "w.sock")
    done: list[asyncio.Task[None]] = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done.append(asyncio.get_running_loop().create_task(run(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    client = WorkerClient(path, by_steps=False)
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        client.close()
        server.close()
        for task in done:
            task.cancel()
        await asyncio.gather(*done, return_exceptions=True)


async def collect(client: WorkerClient) -> list[wire.Event]:
    async with await client.generate(REQUEST) as stream:
        return [event async for events in stream for event in events]


def test_an_answer_cut_at_every_byte_gives_the_same_events(tmp_path: Path) -> None:
    async def main() -> None:
        cuts = iter(range(1, len(ANSWER)))

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for cut in cuts:
                await request_of(reader)
                writer.write(ANSWER[:cut])
                await writer.drain()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                writer.write(ANSWER[cut:])

        async with worker(tmp_path, script) as client:
            for _ in range(1, len(ANSWER)):
                assert await collect(client) == EVENTS

    asyncio.run(main())


def test_a_request_is_the_typed_one_and_connections_are_used_again(tmp_path: Path) -> None:
    async def main() -> None:
        connections, requests = [], []

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            while True:
                requests.append(await request_of(reader))
                writer.write(ANSWER)

        async with worker(tmp_path, script) as client:
            for _ in range(3):
                assert await collect(client) == EVENTS
        assert len(connections) == 1
        head, _, body = requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /generate HTTP/1.1\r\n")
        assert msgspec.json.decode(body, type=wire.GenerateRequest) == REQUEST

    asyncio.run(main())


def test_after_a_rush_only_some_connections_are_kept(tmp_path: Path) -> None:
    ended: asyncio.Queue[None] = asyncio.Queue()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await request_of(reader)
                writer.write(ANSWER)
        finally:
            ended.put_nowait(None)

    async def run() -> None:
        async with worker(tmp_path, script) as client:
            streams = [await client.generate(REQUEST) for _ in range(MAX_IDLE + 5)]
            for stream in streams:
                async with stream:
                    assert [event async for events in stream for event in events] == EVENTS
            for _ in range(5):
                await ended.get()
            assert ended.empty()

    asyncio.run(run())


def test_a_kept_connection_that_the_worker_closed_meanwhile_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        served = 0

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            await request_of(reader)
            writer.write(ANSWER)
            served += 1
            if served == 1:
                await request_of(reader)  # the second request arrives, and nobody answers it here

        async with worker(tmp_path, script) as client:
            assert await collect(client) == EVENTS
            assert await collect(client) == EVENTS
            assert served == 2

    asyncio.run(main())


@pytest.mark.parametrize("sent", [0, 20, len(HEAD), len(HEAD) + 30, len(ANSWER) - len(END) - 40])
def test_an_end_before_the_last_event_is_a_lost_worker(tmp_path: Path, sent: int) -> None:
    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(ANSWER[:sent])

        async with worker(tmp_path, script) as client:
            with pytest.raises(WorkerLost) as lost:
                await collect(client)
            assert lost.value.reached

    asyncio.run(main())


def test_a_complete_body_without_a_last_event_is_a_lost_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(HEAD + chunked(ndjson.encode(wire.Started(1))) + END)
            await request_of(reader)

        async with worker(tmp_path, script) as client:
            with pytest.raises(WorkerLost):
                await collect(client)

    asyncio.run(main())


def test_nobody_at_the_socket_is_a_loss_that_did_not_reach(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(WorkerLost, match="no connection to the worker") as lost:
            await WorkerClient(str(tmp_path / "none.sock")).generate(REQUEST)
        assert not lost.value.reached

    asyncio.run(main())


def test_a_refusal_carries_the_workers_failure(tmp_path: Path) -> None:
    failure = Failure(ErrorCode.CONTEXT_EXCEEDED, "5000 tokens of prompt, 4096 of context", "messages")

    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await request_of(reader)
                body = msgspec.json.encode(failure)
                writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

        async with worker(tmp_path, script) as client:
            for _ in range(2):
                with pytest.raises(Refused) as refused:
                    await collect(client)
                assert refused.value.failure == failure

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"zz\r\n",
        HEAD + chunked(b'{"type":"unknown"}\n'),
        HEAD + chunked(b"not json\n"),
        b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\nbang",
    ],
)
def test_what_cannot_be_read_is_an_internal_failure(tmp_path: Path, answer: bytes) -> None:
    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(answer)
            await reader.read()

        async with worker(tmp_path, script) as client:
            with pytest.raises(Refused) as refused:
                await collect(client)
            assert refused.value.failure.code is ErrorCode.INTERNAL

    asyncio.run(main())


def test_events_that_nobody_takes_stop_the_worker_and_cost_bounded_memory(tmp_path: Path) -> None:
    async def main() -> None:
        piece = chunked(ndjson.encode(wire.Text("x" * 1000, [1])))
        written = 0
        stuck = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await request_of(reader)
            writer.write(HEAD)
            for _ in range(20_000):
                writer.write(piece)
                written += len(piece)
                drain = asyncio.ensure_future(writer.drain())
                for _ in range(20):  # turns of this loop in which the reader could have taken some
                    await asyncio.sleep(0)
                if not drain.done():
                    stuck.set()
                await drain
            writer.write(chunked(ndjson.encode(FINISH)) + END)

        async with worker(tmp_path, script) as client, await client.generate(REQUEST) as stream:
            await stuck.wait()
            assert written < 20 * HIGH_WATER
            taken = [event async for events in stream for event in events]
            assert len(taken) == 20_001

    asyncio.run(main())


def test_closing_a_stream_early_closes_its_connection_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + chunked(ndjson.encode(wire.Started(1))))
            await request_of(reader)
            try:
                assert await reader.read() == b""
            finally:
                gone.set()

        async with worker(tmp_path, script) as client:
            other = await client.generate(REQUEST)
            stream = await client.generate(REQUEST)
            assert await anext(stream) == [wire.Started(1)]
            stream.close()
            stream.close()
            await gone.wait()
            assert await anext(other) == [wire.Started(1)]
            client.close()
            with pytest.raises(WorkerLost):
                await anext(other)
            with pytest.raises(WorkerLost):
                await client.generate(REQUEST)

    asyncio.run(main())


def test_stats_render_and_detokenize_are_typed_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                asked = await request_of(reader)
                path = asked.split(b" ")[1].decode()
                body = msgspec.json.encode(answers[path])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

        answers = {
            "/stats": wire.WorkerStats(steps=5),
            "/render": wire.RenderResult("<s>x", [1, 2]),
            "/detokenize": wire.DetokenizeResult("é", [b"\xc3", b"\xa9"]),
        }
        async with worker(tmp_path, script) as client:
            assert (await client.stats()).steps == 5
            assert await client.render(wire.TextPrompt("x")) == answers["/render"]
            assert await client.detokenize([1, 2]) == answers["/detokenize"]

    asyncio.run(main())
