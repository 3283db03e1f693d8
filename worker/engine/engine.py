"""The engine thread: take messages, schedule, run, update, emit. The rules are in `design.md`."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shared.wire import FinishReason, WorkerStats
from worker.engine.kv_budget import KvBudget
from worker.engine.pace import Pace
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from worker.engine.runner import Pending

log = logging.getLogger("engine")
T = TypeVar("T")

CLEAR_EVERY = 256
"""Steps between two releases of mlx's allocator cache (mlx-lm's cadence)."""


@dataclass(slots=True)
class Output:
    """What a step did to one sequence: admitted it, moved its prefill, gave a token; perhaps ended it."""

    id: str
    token: int | None = None
    admitted: bool = False
    reused: int = 0  # with `admitted`: prompt tokens from the prefix cache
    prefilled: int | None = None  # prompt tokens in the KV cache now
    finish: FinishReason | None = None


OnOutputs = Callable[[list[Output]], None]


@dataclass(frozen=True)
class Loaded:
    """What the engine runs: a model (`worker.models`), its prefix cache, and the sizes of a step."""

    model: Any
    prefix: Any
    max_rows: int
    prefill_chunk: int
    kv: KvBudget = field(default_factory=KvBudget)  # of all rows
    spill: Any = None  # `worker.cache.disk.Spill`, where the prefix cache outlives the worker
    restored_bytes: int = 0  # of the prefix cache, from there
    description: dict[str, Any] = field(default_factory=dict)  # facts for whoever asked for the load


class Engine:
    """Starts its thread at once; `load` runs there. `on_outputs` and `on_fault` are called on that thread.

    `on_outputs` may be set later, but before the first `submit`.
    """

    def __init__(self, on_outputs: OnOutputs | None, on_fault: Callable[[BaseException], None]) -> None:
        self.on_outputs = on_outputs
        self._on_fault = on_fault
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sequences: dict[str, Sequence] = {}
        self._loaded: Loaded | None = None
        self._scheduler: Scheduler | None = None
        self._steps = 0
        self._chunks = 0
        self._tokens = 0
        self._pace = Pace()
        self._step_began: float | None = None
        self._finished_at = 0.0
        self._memory = (0, 0, 0)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def load(self, build: Callable[[], Loaded]) -> "Future[Loaded]":
        """Run `build` on the engine thread and serve what it gives."""

        def adopt() -> Loaded:
            loaded = build()
            self._scheduler = Scheduler(
                max_rows=loaded.max_rows, prefill_chunk=loaded.prefill_chunk, kv=loaded.kv
            )
            self._loaded = loaded
            self._measure()
            return loaded

        return self.call(adopt)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its outputs carry its id."""
        self._inbox.put(lambda: self._add(sequence))

    def cancel(self, sequence_id: str) -> None:
        """End a sequence at the next chunk or step; unknown or ended ids are ignored."""
        self._inbox.put(lambda: self._cancel(sequence_id))

    def spill(self, should_stop: Callable[[], bool]) -> "Future[int]":
        """Write the prefix cache to disk, where the load provided for it; gives the bytes that lie there now."""

        def write() -> int:
            loaded = self._loaded
            if loaded is None or loaded.spill is None:
                return 0
            return int(loaded.spill.write(loaded.prefix, should_stop))

        return self.call(write)

    def resize(self, kv_bytes: int, prefix_cache_bytes: int) -> "Future[None]":
        """Other caps than those of the load, from the next step on. Rows keep what they were promised."""

        def change() -> None:
            import mlx.core as mx

            if self._loaded is not None and self._scheduler is not None:
                self._scheduler.resize(kv_bytes)
                self._loaded.prefix.resize(prefix_cache_bytes)
                mx.clear_cache()
                self._measure()

        return self.call(change)

    def stats(self) -> WorkerStats:
        """Counters as of the last step; never waits for the engine."""
        scheduler, loaded = self._scheduler, self._loaded
        active, peak, cache = self._memory
        return WorkerStats(
            steps=self._steps,
            chunks=self._chunks,
            slowest_s=round(self._pace.slowest_s, 3),
            active=len(scheduler.active) if scheduler else 0,
            waiting=len(scheduler.waiting) if scheduler else 0,
            active_bytes=active,
            peak_bytes=peak,
            cache_bytes=cache,
            kv_bytes=scheduler.promised_bytes if scheduler else 0,
            prefix_bytes=loaded.prefix.nbytes if loaded else 0,
            restored_bytes=loaded.restored_bytes if loaded else 0,
            tokens=self._tokens,
        )

    def busy_s(self) -> float:
        """Seconds that the present step has taken so far; 0 when idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; a step that is running is waited for, up to `timeout_s`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    # ------------------------------------------------------------ on the engine thread

    def _main(self) -> None:
        try:
            while self._take():
                if self._scheduler is not None and self._scheduler.has_work:
                    self._run_until_idle()
        except BaseException as error:
            log.exception("engine.fault")
            self._on_fault(error)
        finally:
            self._loaded = None  # arrays are freed on the thread that made them

    def _take(self, *, wait: bool = True) -> bool:
        """Handle waiting messages, at least one if `wait`; False = close."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                self._inbox.put(None)  # whoever looks next sees it too
                return False
            message()
            wait = False

    def _run_until_idle(self) -> None:
        from worker.engine import runner  # mlx is first imported here, on the thread that owns it

        assert self._loaded is not None
        assert self._scheduler is not None
        model, scheduler = self._loaded.model, self._scheduler
        pending: runner.Pending | None = None
        while True:
            if not self._take(wait=False):
                return
            outputs = [output for sequence in scheduler.admit() for output in self._admit(sequence)]
            chunk = scheduler.prefill_chunk
            step = scheduler.schedule(self._pace.budget(chunk) if scheduler.has_decode else chunk)
            for old, again in step.preempted:
                self._sequences[old.id] = again
                self._keep(old)
            if not step and pending is None:
                self._emit(outputs)
                if not scheduler.has_work:
                    self._step_began = None
                    return
                continue
            self._step_began = time.monotonic()
            self._emit(outputs)
            begun = runner.run(model, step) if step else None
            if pending is not None:
                self._finish(pending)
            if (
                begun is not None and begun.chunk
            ):  # nothing is built on a prompt that is not through: see design.md
                self._finish(begun)
                begun = None
            self._emit([Output(row.id, prefilled=row.num_cached) for row, _ in step.prefill])
            self._chunks += len(step.prefill)
            pending = begun
            self._count()

    def _finish(self, pending: "Pending") -> None:
        """Wait for a step, and hand its tokens out."""
        assert self._scheduler is not None
        self._emit(self._update(pending))
        pending.settle()
        now = time.monotonic()
        took_s = now - max(pending.begun_at, self._finished_at)
        self._pace.step(took_s, pending.num_prefill, self._scheduler.prefill_chunk, decoded=pending.decoded)
        self._finished_at = now

    def _admit(self, sequence: Sequence) -> list[Output]:
        """Give a new row its caches, from the prefix cache as far as that goes; one token is left to run.

        Nobody hears of the second admission of a row that was preempted.
        """
        assert self._loaded is not None
        caches, reused = self._loaded.prefix.take(sequence.prompt)
        if caches is None:
            caches = self._loaded.model.make_caches(len(sequence.prompt))
        sequence.caches = caches
        sequence.num_cached = sequence.num_reused = reused
        return [] if sequence.was_preempted else [Output(sequence.id, admitted=True, reused=reused)]

    def _update(self, pending: "Pending") -> list[Output]:
        """Read the tokens of a step and book them; rows that ended meanwhile are passed over."""
        outputs: list[Output] = []
        for row, token in zip(pending.rows, pending.read(), strict=True):
            if row.status is Status.FINISHED:
                continue
            row.generated.append(token)
            self._tokens += 1
            output = Output(row.id, token=token)
            if token in row.eos:
                output.finish = "stop"
            elif row.num_generated >= row.max_tokens:
                output.finish = "length"
            if output.finish:
                self._end(row)
            outputs.append(output)
        return outputs

    def _add(self, sequence: Sequence) -> None:
        assert self._scheduler is not None
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)

    def _cancel(self, sequence_id: str) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
            self._emit([Output(sequence_id, finish="cancelled")])

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        assert self._scheduler is not None
        self._scheduler.remove(sequence)
        self._sequences.pop(sequence.id, None)
        self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Keep the KV of a row that has left for the next request that begins alike."""
        assert self._loaded is not None
        if sequence.caches is not None:
            self._loaded.prefix.put(sequence.cached_ids, sequence.caches)
        sequence.caches = sequence.token = None

    def _emit(self, outputs: list[Output]) -> None:
        if outputs and self.on_outputs is not None:
            self.on_outputs(outputs)

    def _count(self) -> None:
        """Per step: counters for the heartbeat, and now and then mlx's allocator cache is given back."""
        import mlx.core as mx

        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        if self._steps % 16 == 1:
            self._measure()

    def _measure(self) -> None:
        import mlx.core as mx

        self._memory = (mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())
