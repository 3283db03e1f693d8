"""Events by steps: one frame for all requests, each reader gets its own, nobody waits for a slow one."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.workers.client import WorkerClient, WorkerLost
from parent.workers.connection import MAX_WAITING, joined
from shared import ndjson, wire
from shared.errors import Refused
from tests.parent.test_client import END, FINISH, HEAD, chunked, request_of

Parts = list[tuple[str, list[wire.Event]]]


class Script:
    """The worker's side, driven by the test: `frame` and `end` say when what is sent."""

    def __init__(self) -> None:
        self.steps: asyncio.StreamWriter | None = None
        self.bodies: dict[str, asyncio.StreamWriter] = {}
        self.arrived = asyncio.Condition()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, _, body = (await request_of(reader)).partition(b"\r\n\r\n")
                writer.write(HEAD)
                async with self.arrived:
                    if head.startswith(b"GET /steps/"):
                        self.steps = writer
                    else:
                        asked = msgspec.json.decode(body, type=wire.GenerateRequest)
                        assert asked.reader
                        self.bodies[asked.request_id] = writer
                    self.arrived.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def frame(self, parts: Parts) -> None:
        assert self.steps is not None
        self.steps.write(chunked(ndjson.encode(wire.StepFrame(parts))))

    def end(self, name: str) -> None:
        self.bodies[name].write(END)


@asynccontextmanager
async def worker(tmp_path: Path) -> AsyncIterator[tuple[WorkerClient, Script]]:
    script = Script()
    path = str(tmp_path / "w.sock")
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(script.run(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    client = WorkerClient(path)
    try:
        async with asyncio.timeout(30):
            yield client, script
    finally:
        client.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(name: str) -> wire.GenerateRequest:
    return wire.GenerateRequest(request_id=name, prompt=wire.TextPrompt("x"), seed=1)


async def collect(client: WorkerClient, name: str) -> list[wire.Event]:
    async with await client.generate(request(name)) as stream:
        return [event async for events in stream for event in events]


async def both(script: Script, *names: str) -> None:
    async with script.arrived:
        await script.arrived.wait_for(lambda: set(names) <= set(script.bodies))


def test_each_reader_gets_its_own_events_from_shared_frames(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script):
            a, b = (asyncio.create_task(collect(client, name)) for name in "ab")
            await both(script, "a", "b")
            script.frame([("a", [wire.Started(1)]), ("b", [wire.Started(2)])])
            script.frame([("b", [wire.Text("x", [1])]), ("gone", [wire.Text("y", [1])])])
            script.frame([("a", [wire.Text("1", [1]), FINISH]), ("b", [FINISH])])
            script.end("a")
            script.end("b")
            assert await a == [wire.Started(1), wire.Text("1", [1]), FINISH]
            assert await b == [wire.Started(2), wire.Text("x", [1]), FINISH]

    asyncio.run(main())


@pytest.mark.parametrize("body_first", [True, False])
def test_the_end_of_the_body_and_the_last_event_come_in_either_order(
    tmp_path: Path, body_first: bool
) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script):
            for name in ("a", "b"):  # the second request uses the first one's connection
                answer = asyncio.create_task(collect(client, name))
                await both(script, name)
                if body_first:
                    script.end(name)
                    await asyncio.sleep(0)
                    script.frame([(name, [FINISH])])
                else:
                    script.frame([(name, [FINISH])])
                    script.end(name)
                assert await answer == [FINISH]

    asyncio.run(main())


def test_a_frame_cut_anywhere_is_read_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script):
            answer = asyncio.create_task(collect(client, "a"))
            await both(script, "a")
            assert script.steps is not None
            line = ndjson.encode(wire.StepFrame([("a", [wire.Text("東京", [1, 2])])]))
            for byte in line:
                script.steps.write(chunked(bytes([byte])))
                await script.steps.drain()
            script.frame([("a", [FINISH])])
            script.end("a")
            assert await answer == [wire.Text("東京", [1, 2]), FINISH]

    asyncio.run(main())


def test_a_reader_that_takes_nothing_holds_few_events_and_stalls_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script), await client.generate(request("slow")) as slow:
            quick = asyncio.create_task(collect(client, "quick"))
            await both(script, "slow", "quick")
            count = 20 * MAX_WAITING
            for number in range(count):
                scores = [wire.Logprob(number, -0.5, b"a", [wire.Alternative(9, -1.0, b"\xff")])]
                script.frame([("slow", [wire.Text("a", [number], scores)])])
            script.frame([("quick", [FINISH])])
            script.end("quick")
            assert await quick == [FINISH]
            held = await anext(slow)
            assert len(held) <= MAX_WAITING + 1
            texts = [event for event in held if isinstance(event, wire.Text)]
            assert "".join(event.text for event in texts) == "a" * count
            assert [i for event in texts for i in event.ids] == list(range(count))
            assert [one.id for event in texts for one in event.logprobs] == list(range(count))
            assert texts[0].logprobs[0].top == [wire.Alternative(9, -1.0, b"\xff")]

    asyncio.run(main())


def test_the_end_of_the_steps_is_the_loss_of_every_answer_that_reads_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script):
            answers = [asyncio.create_task(collect(client, name)) for name in "ab"]
            await both(script, "a", "b")
            assert script.steps is not None
            script.steps.close()
            for answer in answers:
                with pytest.raises(WorkerLost):
                    await answer
            again = asyncio.create_task(collect(client, "c"))  # and the next request opens them again
            await both(script, "c")
            script.frame([("c", [FINISH])])
            script.end("c")
            assert await again == [FINISH]

    asyncio.run(main())


def test_what_follows_an_unreadable_frame_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (client, script):
            answer = asyncio.create_task(collect(client, "a"))
            await both(script, "a")
            assert script.steps is not None
            bad = chunked(b'{"parts":[["a",[{"type":"text","text":1}]]]}\n')
            good = chunked(ndjson.encode(wire.StepFrame([("a", [FINISH])])))
            script.steps.write(bad + good)  # in one piece
            script.end("a")
            with pytest.raises(Refused, match="cannot be read"):
                await answer

    asyncio.run(main())


EVENTS = st.lists(
    st.one_of(
        st.builds(wire.Text, st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2)),
        st.builds(wire.Reasoning, st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2)),
        st.builds(wire.Prefill, st.integers(0, 9), st.just(9)),
    ),
    max_size=12,
)


@given(EVENTS)
def test_joined_events_say_the_same(events: list[wire.Event]) -> None:
    few = joined(events)
    for kind in (wire.Text, wire.Reasoning):
        assert "".join(e.text for e in few if isinstance(e, kind)) == "".join(
            e.text for e in events if isinstance(e, kind)
        )
    content = (wire.Text, wire.Reasoning)
    assert [i for e in few if isinstance(e, content) for i in e.ids] == [
        i for e in events if isinstance(e, content) for i in e.ids
    ]
    assert all(type(a) is not type(b) for a, b in itertools.pairwise(few))
