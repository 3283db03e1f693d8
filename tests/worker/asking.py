"""A whole worker in the test's own process, on a tiny real model, and the few questions that tests ask it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from shared.control import LaunchModel
from shared.wire import (
    Event,
    Failed,
    Finish,
    GenerateRequest,
    Reasoning,
    Sampling,
    Text,
    TextPrompt,
    ToolCall,
)
from worker.context import open_context
from worker.engine.engine import Engine, Output
from worker.load import begin_load
from worker.pipeline import Pipeline

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01)


@asynccontextmanager
async def served(
    path: Path, watch: Callable[[Engine], None] | None = None, **launch
) -> AsyncIterator[Pipeline]:
    """`launch`: fields of the launch record. `watch` is called on the engine thread, with every step's outputs."""
    loop = asyncio.get_running_loop()
    pipelines: list[Pipeline] = []

    def on_outputs(outputs: list[Output]) -> None:
        if watch is not None:
            watch(engine)
        loop.call_soon_threadsafe(pipelines[0].dispatch, outputs)

    engine = Engine(
        on_outputs, lambda error: loop.call_soon_threadsafe(pytest.fail, f"engine fault: {error}")
    )
    try:
        record = LaunchModel(model_id="m", path=str(path), **launch)
        loading = begin_load(record, engine, lambda stage, done, total: None)
        context = await open_context(record, loading)
        pipelines.append(Pipeline(context, engine))
        yield pipelines[0]
    finally:
        await asyncio.to_thread(engine.close)


def request(name: str = "r", **more) -> GenerateRequest:
    given = {
        "prompt": TextPrompt("the cat and the hat"),
        "seed": 11,
        "sampling": GREEDY,
        "max_tokens": 24,
        **more,
    }
    return GenerateRequest(request_id=name, **given)


async def ask(pipeline: Pipeline, asked: GenerateRequest) -> list[Event]:
    stream = await pipeline.prepare(asked)
    async with aclosing(pipeline.run(stream)) as batches:
        return [event async for batch in batches for event in batch]


def text(events: list[Event], kind: type = Text) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def ids(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Text | Reasoning | ToolCall) for i in event.ids]


def calls(events: list[Event]) -> list[tuple[str, str]]:
    """Names and arguments, after a look at how the pieces of calls follow each other."""
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCall):
            if event.index == len(found):
                assert event.name
                assert event.id.startswith("call_")
                found.append((event.name, ""))
            else:
                assert not event.name
                assert not event.id
            assert event.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + event.arguments)
    return found


def finish(events: list[Event]) -> Finish:
    assert isinstance(events[-1], Finish)
    assert not any(isinstance(e, Finish | Failed) for e in events[:-1])
    return events[-1]


def run(body: Callable) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))
