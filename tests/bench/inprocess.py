"""The engine without any process around it: `python -m tests.bench.inprocess MODEL_DIR`.

Loads the model once, then answers one JSON command a line on stdin: {"way": "bare" | "engine", "ids": [...],
"tokens": n} gives {"ttft_s", "decode_tps"}. "bare" is the shortest loop mlx allows over the same graph: build the
next step, evaluate it asynchronously, read the token before. It is the limit of what an engine can reach.
"""

import asyncio
import json
import queue
import sys
import time

from shared.control import LaunchModel
from worker.context import open_context
from worker.engine.engine import Engine, Output
from worker.engine.sequence import SamplingPlan, Sequence
from worker.load import begin_load


def bare(model, ids: list[int], tokens: int, chunk: int = 0) -> dict[str, float]:
    """On the engine thread. `chunk`: the prompt goes in such pieces, 0 = whole."""
    import mlx.core as mx

    from worker.layers.batch import solo

    def following(token: mx.array) -> mx.array:
        return mx.argmax(model.head(model(solo(token, caches))[-1:]), axis=-1).astype(mx.int32)

    began = time.perf_counter()
    caches = model.make_caches(len(ids))
    while chunk and len(ids) > chunk:
        model(solo(mx.array(ids[:chunk], dtype=mx.int32), caches))
        mx.eval([array for cache in caches for array in cache.arrays()])
        ids = ids[chunk:]
    token = following(mx.array(ids, dtype=mx.int32))
    mx.async_eval(token)
    first = 0.0
    for index in range(tokens):
        if index < tokens - 1:
            after = following(token)
            mx.async_eval(after)
        token.item()
        if index == 0:
            first = time.perf_counter()
        token = after
    done = time.perf_counter()
    return {"ttft_s": first - began, "decode_tps": (tokens - 1) / (done - first)}


def through_engine(
    engine: Engine, heard: "queue.SimpleQueue", name: str, ids: list[int], tokens: int
) -> dict:
    """One sequence, from `submit` to its last token."""
    began = time.perf_counter()
    engine.submit(Sequence(name, ids, tokens, SamplingPlan(), 0, frozenset()))
    times: list[float] = []
    while True:
        output, at = heard.get()
        if output.token is not None:
            times.append(at)
        if output.finish:
            return {"ttft_s": times[0] - began, "decode_tps": (tokens - 1) / (times[-1] - times[0])}


def main() -> None:
    heard: queue.SimpleQueue = queue.SimpleQueue()

    def hear(outputs: list[Output]) -> None:
        at = time.perf_counter()
        for output in outputs:
            heard.put((output, at))

    engine = Engine(hear, lambda error: sys.exit(str(error)))
    launch = LaunchModel(model_id="bench", path=sys.argv[1], prefix_cache_bytes=0)
    loading = begin_load(launch, engine, lambda stage, done, total: None)
    asyncio.run(open_context(launch, loading))
    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        command = json.loads(line)
        ids, tokens = command["ids"], command["tokens"]
        if command["way"] == "bare":
            found = engine.call(
                lambda ids=ids, tokens=tokens: bare(engine._loaded.model, ids, tokens)
            ).result()
        else:
            found = through_engine(engine, heard, str(number), ids, tokens)
        print(json.dumps(found), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
