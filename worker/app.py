"""The routes of a model worker, on its Unix socket only: decode, call the pipeline, encode. No policy.

`POST /generate` answers 200 only when the request is certain to run; before that a non-200 carries a `Failure`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import msgspec

from shared import ndjson
from shared.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    run_until_gone,
    send_chunk,
    start,
)
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.wire import (
    DetokenizeRequest,
    EmbedRequest,
    Failed,
    GenerateRequest,
    MountRequest,
    RankRequest,
    RenderRequest,
    RenderResult,
    StepFrame,
    UnmountRequest,
    WorkerStats,
)
from worker.embed.embedder import Embedder
from worker.pipeline import Pipeline

log = logging.getLogger("worker")

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_generate = msgspec.json.Decoder(GenerateRequest)
_render = msgspec.json.Decoder(RenderRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
_embed = msgspec.json.Decoder(EmbedRequest)
_mount = msgspec.json.Decoder(MountRequest)
_unmount = msgspec.json.Decoder(UnmountRequest)
_rank = msgspec.json.Decoder(RankRequest)
_json = msgspec.json.Encoder()

STEPS = "/steps/"
_NDJSON = [(b"content-type", b"application/x-ndjson")]
_STATUS = {ErrorCode.SHUTTING_DOWN: 503, ErrorCode.INTERNAL: 500, ErrorCode.ENGINE_FAULT: 500}


def build_app(pipeline: Pipeline, embedder: Embedder, stats: Callable[[], WorkerStats]) -> Handler:
    """The ASGI application of one model worker."""

    async def generate(receive: Receive, send: Send) -> None:
        request = _generate.decode(await read_body(receive, ndjson.MAX_LINE))
        stream = await pipeline.prepare(request)

        async def answer() -> None:
            await start(send, 200, _NDJSON)
            if request.reader:
                await pipeline.run_by_steps(stream)
                await send_chunk(send, b"", more=False)
                return
            async with aclosing(pipeline.run(stream)) as batches:
                async for events in batches:
                    await send_chunk(send, b"".join(map(ndjson.encode, events)))
            await send_chunk(send, b"", more=False)

        await run_until_gone(receive, answer)

    async def steps(name: str, receive: Receive, send: Send) -> None:
        """Everything that is ready when the reader is written to leaves in one piece."""
        await read_body(receive, 0)
        frames: list[StepFrame] = []
        arrived = asyncio.Event()

        def take(frame: StepFrame) -> None:
            frames.append(frame)
            arrived.set()

        async def answer() -> None:
            await start(send, 200, _NDJSON)
            while True:
                await arrived.wait()
                arrived.clear()
                lines = b"".join(map(ndjson.encode, frames))
                frames.clear()
                await send_chunk(send, lines)

        if name in pipeline.readers:
            raise refuse(ErrorCode.INVALID_REQUEST, f"somebody reads /steps/{name} already")
        pipeline.readers[name] = take
        try:
            await run_until_gone(receive, answer)
        finally:
            del pipeline.readers[name]

    async def render(receive: Receive, send: Send) -> None:
        request = _render.decode(await read_body(receive, ndjson.MAX_LINE))
        text, ids = await pipeline.render(
            request.prompt,
            add_special=request.add_special,
            add_generation_prompt=request.add_generation_prompt,
        )
        await respond(send, 200, _json.encode(RenderResult(text, ids)))

    async def detokenize(receive: Receive, send: Send) -> None:
        request = _detokenize.decode(await read_body(receive, ndjson.MAX_LINE))
        await respond(send, 200, _json.encode(await pipeline.detokenize(request.ids)))

    async def embed(receive: Receive, send: Send) -> None:
        request = _embed.decode(await read_body(receive, ndjson.MAX_LINE))

        async def answer() -> None:
            await respond(send, 200, _json.encode(await embedder.embed(request)))

        await run_until_gone(receive, answer)

    async def rank(receive: Receive, send: Send) -> None:
        request = _rank.decode(await read_body(receive, ndjson.MAX_LINE))

        async def answer() -> None:
            await respond(send, 200, _json.encode(await embedder.rank(request)))

        await run_until_gone(receive, answer)

    async def mount(receive: Receive, send: Send) -> None:
        request = _mount.decode(await read_body(receive, ndjson.MAX_LINE))
        await respond(send, 200, _json.encode(await pipeline.mount(request.key, request.path)))

    async def unmount(receive: Receive, send: Send) -> None:
        request = _unmount.decode(await read_body(receive, ndjson.MAX_LINE))
        await respond(send, 200, _json.encode(await pipeline.unmount(request.key)))

    async def give_adapters(receive: Receive, send: Send) -> None:
        await respond(send, 200, _json.encode(await pipeline.mounts()))

    async def give_cache(receive: Receive, send: Send) -> None:
        await respond(send, 200, _json.encode(await pipeline.cache_report()))

    async def give_stats(receive: Receive, send: Send) -> None:
        await respond(send, 200, _json.encode(stats()))

    routes = {
        ("POST", "/generate"): generate,
        ("POST", "/render"): render,
        ("POST", "/detokenize"): detokenize,
        ("POST", "/embed"): embed,
        ("POST", "/rank"): rank,
        ("GET", "/stats"): give_stats,
        ("GET", "/cache"): give_cache,
        ("GET", "/adapters"): give_adapters,
        ("POST", "/adapters"): mount,
        ("DELETE", "/adapters"): unmount,
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        handler = routes.get((scope["method"], scope["path"]))
        if scope["method"] == "GET" and scope["path"].startswith(STEPS):
            handler = partial(steps, scope["path"].removeprefix(STEPS))
        has_begun = False

        async def watched(message: dict[str, object]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if handler is None:
                raise Refused(
                    Failure(ErrorCode.NOT_FOUND, f"no route {scope['method']} {scope['path']} here")
                )
            await handler(receive, watched)  # type: ignore[arg-type]
            return
        except ClientGone:
            return
        except Refused as refused:
            failure = refused.failure
        except msgspec.ValidationError as error:
            failure = Failure(ErrorCode.INVALID_REQUEST, f"the request does not fit the wire: {error}")
        except msgspec.DecodeError as error:
            failure = Failure(ErrorCode.INVALID_REQUEST, f"the request is not JSON: {error}")
        except Exception as error:
            log.exception("worker.request_failed")
            failure = Failure(ErrorCode.INTERNAL, f"the worker failed: {type(error).__name__}: {error}")
        if has_begun:
            await send_chunk(send, ndjson.encode(Failed(failure)), more=False)
        else:
            await respond(send, _STATUS.get(failure.code, 400), _json.encode(failure))

    return app
