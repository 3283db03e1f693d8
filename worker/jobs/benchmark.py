"""Measure how fast a served model is, over sizes of prompts and numbers of streams.

Stages: warm up, measure. What is found is the result of the job: its points, and the numbers of each by name.
"""

import asyncio

import httpx2
import msgspec

from shared.errors import ErrorCode, refuse
from shared.jobs import JobDone, JobLog, JobStage
from shared.lab import Benchmark
from worker.jobs.context import JobContext
from worker.lab.throughput import Bench, Point

LOOK_S = 0.1


def run(spec: Benchmark, ctx: JobContext) -> JobDone:
    """Raises `Refused`: invalid_request, model_not_found, engine_unavailable, engine_fault, shutting_down."""
    if not spec.url:
        raise refuse(ErrorCode.INVALID_REQUEST, "name the url of the server to measure", param="url")
    try:
        points = asyncio.run(_measured(spec, ctx))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise refuse(ErrorCode.ENGINE_UNAVAILABLE, f"{spec.url} does not answer: {said}") from None
    best = max(points, key=lambda point: point.total_tps)
    summary = (
        f"{points[0].decode_tps:.1f} tokens/s a stream, {best.total_tps:.1f} in all with {best.streams}, "
        f"first token after {points[0].ttft_s * 1000:.0f} ms"
    )
    numbers = {name: value for point in points for name, value in numbers_of(point).items()}
    return JobDone("", summary, {"numbers": numbers, "points": msgspec.to_builtins(points)})


async def _measured(spec: Benchmark, ctx: JobContext) -> list[Point]:
    """Every point, unless the job is stopped before."""
    work = asyncio.ensure_future(_points(spec, ctx))
    try:
        while not work.done():
            ctx.check()
            await asyncio.wait({work}, timeout=LOOK_S)
        return work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _points(spec: Benchmark, ctx: JobContext) -> list[Point]:
    bench = Bench(spec.url, spec.model, spec.seed)
    pairs = [(tokens, streams) for tokens in spec.prompt_tokens for streams in spec.streams]
    points: list[Point] = []
    try:
        ctx.emit(JobStage("warm up", message=spec.model))
        await bench.warm_up()
        for done, (tokens, streams) in enumerate(pairs):
            ctx.emit(JobStage("measure", done, len(pairs), f"{tokens} tokens x {streams}"))
            point = await bench.measure(tokens, streams, spec.completion_tokens, spec.rounds)
            ctx.emit(
                JobLog(
                    f"{tokens} tokens x {streams}: first token {point.ttft_s * 1000:.0f} ms, "
                    f"{point.decode_tps:.1f} tokens/s each, {point.total_tps:.1f} together"
                )
            )
            points.append(point)
        ctx.emit(JobStage("measure", len(pairs), len(pairs)))
    finally:
        await bench.close()
    return points


def numbers_of(point: Point) -> dict[str, float]:
    """By the names under which they are kept, such as `ttft_s/1024x4`."""
    at = f"{point.prompt_tokens}x{point.streams}"
    return {
        f"ttft_s/{at}": point.ttft_s,
        f"decode_tps/{at}": point.decode_tps,
        f"total_tps/{at}": point.total_tps,
    }
