"""Deep health, on demand: is the engine of a ready worker able to compute, now?"""

import asyncio
import time
import uuid
from typing import Protocol

import msgspec

from parent.workers.client import EventStream, WorkerClient, WorkerLost
from parent.workers.states import State
from shared import wire
from shared.errors import Refused


class Checked(Protocol):
    """What is looked at: a supervisor."""

    client: WorkerClient | None
    facts: wire.ModelFacts | None
    stats: wire.WorkerStats

    @property
    def state(self) -> State: ...

    async def heartbeat(self) -> None:
        """Returns at the next one."""


class Check(msgspec.Struct, frozen=True):
    """What a look at a worker found, and how long it took."""

    ok: bool
    seconds: float
    detail: str


async def check(supervisor: Checked, timeout_s: float) -> Check:
    """An idle worker computes one token; of a busy one the next heartbeats must show that its work goes on."""
    began = time.monotonic()
    client = supervisor.client
    if supervisor.state is not State.READY or client is None or supervisor.facts is None:
        return Check(False, 0.0, f"the worker is {supervisor.state}")
    try:
        async with asyncio.timeout(timeout_s):
            if supervisor.stats.active + supervisor.stats.waiting:
                detail = await _until_it_moves(supervisor)
            else:
                detail = await _smallest(client, supervisor.facts)
    except TimeoutError:
        return Check(False, time.monotonic() - began, f"no answer within {timeout_s:g} s")
    except (WorkerLost, Refused) as error:
        return Check(False, time.monotonic() - began, str(error))
    return Check(not detail, time.monotonic() - began, detail or "ok")


async def _smallest(client: WorkerClient, facts: wire.ModelFacts) -> str:
    """What is wrong with the smallest thing that the model can do; "" for nothing."""
    prompt = wire.TokenPrompt([facts.vocab_size - 1])
    if facts.kind == "reranker":
        await client.rank(wire.RankRequest(query="a", documents=["b"]))
        return ""
    if facts.kind == "embedding":
        await client.embed(wire.EmbedRequest(inputs=[prompt]))
        return ""
    name = f"check-{uuid.uuid4().hex}"
    request = wire.GenerateRequest(request_id=name, prompt=prompt, seed=0, max_tokens=1)
    return await _one_token(await client.generate(request))


async def _one_token(stream: EventStream) -> str:
    async with stream:
        async for events in stream:
            if isinstance(events[-1], wire.Failed):
                return events[-1].failure.message
    return ""


async def _until_it_moves(supervisor: Checked) -> str:
    before = supervisor.stats
    while True:
        await supervisor.heartbeat()
        now = supervisor.stats
        if supervisor.state is not State.READY:
            return f"the worker is {supervisor.state}"
        moved = (now.steps, now.chunks, now.tokens) != (before.steps, before.chunks, before.tokens)
        if moved or not now.active + now.waiting:
            return ""
