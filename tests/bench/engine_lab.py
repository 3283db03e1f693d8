"""The engine alone in a process of its own, and how it is asked: `python -m tests.bench.engine_lab MODEL_DIR`.

Loads the model once, then answers one JSON command a line on stdin: {"do": name, …} calls the method of that name of
`Lab` with the rest. Nothing of the parent or the wire is in it.
"""

import asyncio
import contextlib
import itertools
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.control import LaunchModel
from tests.bench.inprocess import bare, through_engine
from worker.context import open_context
from worker.engine.engine import Engine, Loaded, Output
from worker.engine.sequence import SamplingPlan, Sequence
from worker.leave import leave
from worker.load import begin_load

ROOT = Path(__file__).resolve().parents[2]

Ask = Callable[..., Any]
"""ask(name, **arguments) -> what the method gives."""

ENDLESS = 1 << 20
"""Tokens of a row that is cancelled once it has served."""


@contextlib.contextmanager
def lab(model: Path, environment: dict[str, str]) -> Iterator[Ask]:
    """The process, asked over its standard input."""
    command = [sys.executable, "-m", "tests.bench.engine_lab", str(model)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> Any:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the process with the engine has died; what it said is above")
            return json.loads(line)

        def ask(name: str, **arguments: Any) -> Any:
            process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
            process.stdin.flush()
            return answer()

        answer()
        yield ask
        process.stdin.close()


class Lab:
    """On the main thread of that process. Prompts are random ids; no row ends before its last token."""

    def __init__(self, path: str) -> None:
        self.heard: queue.SimpleQueue[tuple[Output, float]] = queue.SimpleQueue()
        self.engine = Engine(self._hear, lambda error: os._exit(1))
        launch = LaunchModel(model_id="bench", path=path, prefix_cache_bytes=0, max_rows=16)
        loading = begin_load(launch, self.engine, lambda stage, done, total: None)
        asyncio.run(open_context(launch, loading))
        self.loaded: Loaded = loading.weights.result()
        self.count = 0

    def bare(self, tokens: int, prompt: int) -> dict[str, float]:
        """The shortest loop over the same graph, its prompt in chunks like the engine's."""
        ids = self._ids(prompt)
        return self.engine.call(
            lambda: bare(self.loaded.model, ids, tokens, self.loaded.prefill_chunk)
        ).result()

    def engine_alone(self, tokens: int, prompt: int) -> dict[str, float]:
        """One row through the engine."""
        self.count += 1
        return through_engine(self.engine, self.heard, str(self.count), self._ids(prompt), tokens)

    def mixed(self, rows: int, prompt: int) -> dict[str, float]:
        """`rows` decode; then a prompt of that length comes. Tokens a second of all of them without and with it, and
        the time to its first token.
        """
        names = [self._submit(self._ids(32), ENDLESS) for _ in range(rows)]
        self._until_tokens(names, 12)
        before = self._rate(names, 24)
        began = time.perf_counter()
        long = self._submit(self._ids(prompt), ENDLESS)
        count = 0
        while True:
            name, output, at = self._next_token()
            if name == long:
                break
            count += output.token is not None
        during = count / (at - began)
        self._cancel([long])
        after = self._rate(names, 24)
        self._cancel(names)
        return {"alone_tps": (before + after) / 2, "during_tps": during, "prefill_s": at - began}

    def steps(self, rows: int, context: int, count: int) -> list[float]:
        """Seconds of `count` decode steps of `rows` rows with `context` tokens in their caches, filled with noise."""
        ids = self._ids(context)
        self.engine.call(lambda: self._keep_noise(ids)).result()
        names = [self._submit([*ids, n + 1], ENDLESS) for n in range(rows)]
        self._until_tokens(names, 4)
        self.engine.call(lambda: self.loaded.prefix.resize(0)).result()
        times = []
        last = names[-1]
        while len(times) <= count:
            name, _, at = self._next_token()
            if name == last:
                times.append(at)
        self._cancel(names)
        return [after - before for before, after in itertools.pairwise(times)]

    def peak(self, rows: int, prompt: int, tokens: int) -> dict[str, float]:
        """The most bytes in use by mlx while `rows` rows run to their end, and what they are by formula."""
        import mlx.core as mx

        def start() -> None:
            mx.clear_cache()
            mx.reset_peak_memory()

        self.engine.call(start).result()
        names = {self._submit(self._ids(prompt), tokens) for _ in range(rows)}
        while names:
            output, _ = self.heard.get()
            if output.finish:
                names.discard(output.id)
        return {
            "peak": self.engine.call(mx.get_peak_memory).result(),
            "weights": self.loaded.description["weights_bytes"],
            "kv": rows * self.loaded.kv.row_bytes(prompt + tokens),
        }

    def load_peak(self) -> dict[str, float]:
        """The most bytes in use by mlx so far; asked first, that is while the weights came in."""
        import mlx.core as mx

        weights = self.loaded.description["weights_bytes"]
        return {"peak": self.engine.call(mx.get_peak_memory).result(), "weights": weights}

    def limits(self) -> dict[str, float]:
        """What this machine can do at best here: bytes a second read by a one-row product that fits no cache, and
        floating-point operations a second of a large product; and the model's bytes.
        """
        rate, flops = self.engine.call(_limits).result()
        return {
            "bytes_per_s": rate,
            "flops": flops,
            "weights_bytes": self.loaded.description["weights_bytes"],
            "kv_bytes_per_token": self.loaded.kv.token_bytes,
        }

    # ------------------------------------------------------------ how rows are heard

    def _hear(self, outputs: list[Output]) -> None:
        at = time.perf_counter()
        for output in outputs:
            self.heard.put((output, at))

    def _submit(self, ids: list[int], tokens: int) -> str:
        self.count += 1
        name = str(self.count)
        self.engine.submit(Sequence(name, ids, tokens, SamplingPlan(), 0, frozenset()))
        return name

    def _next_token(self) -> tuple[str, Output, float]:
        while True:
            output, at = self.heard.get()
            if output.token is not None:
                return output.id, output, at

    def _until_tokens(self, names: list[str], count: int) -> None:
        """Wait until each has told so many tokens from now on."""
        left = dict.fromkeys(names, count)
        while any(value > 0 for value in left.values()):
            name, _, _ = self._next_token()
            if name in left:
                left[name] -= 1

    def _rate(self, names: list[str], count: int) -> float:
        """Tokens a second of all of them, over so many steps."""
        last, steps, began = names[-1], 0, 0.0
        while True:
            name, _, at = self._next_token()
            if name == last:
                began = began or at
                if steps == count:
                    return count * len(names) / (at - began)
                steps += 1

    def _cancel(self, names: list[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        left = set(names)
        while left:
            output, _ = self.heard.get()
            if output.finish:
                left.discard(output.id)

    def _ids(self, count: int) -> list[int]:
        return [random.randrange(100, 10_000) for _ in range(count)]

    def _keep_noise(self, ids: list[int]) -> None:
        """On the engine thread: have caches of these ids kept, as if they had been run."""
        import mlx.core as mx

        caches = self.loaded.model.make_caches(len(ids))
        for cache, layer in zip(caches, self.loaded.model.layout, strict=True):
            shape = (1, layer.num_kv_heads, len(ids), layer.head_dim)
            cache.update(mx.random.normal(shape), mx.random.normal(shape))
            mx.eval(cache.arrays())
        self.loaded.prefix.resize(1 << 40)
        self.loaded.prefix.put(ids, caches)


def _limits() -> tuple[float, float]:
    """On the engine thread: bytes and operations a second, medians of 5."""
    import mlx.core as mx

    def measure(x: mx.array, weights: list[mx.array]) -> float:
        mx.eval(x, weights)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            mx.eval([x @ weight.T for weight in weights])
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    tall = [mx.random.normal((16_384, 2_048)) for _ in range(2)]
    rate = sum(weight.nbytes for weight in tall) / measure(mx.random.normal((1, 2_048)), tall)
    square = mx.random.normal((2_048, 2_048))
    flops = 2 * 512 * square.size / measure(mx.random.normal((512, 2_048)), [square])
    return rate, flops


def main() -> None:
    """Serve commands until stdin ends."""
    found = Lab(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(found, command.pop("do"))(**command)), flush=True)
    found.engine.close()
    leave(0)


if __name__ == "__main__":
    main()
