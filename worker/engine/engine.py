"""The engine thread: take messages, schedule, run, update, emit. The rules are in `design.md`."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shared.errors import ErrorCode, Failure, Refused
from shared.logs import event
from shared.wire import FinishReason, WorkerStats
from worker.cache.prefix import Branch, Lookup, asked_of_disk, checkpoint_of, marks_of
from worker.engine.kv_budget import KvBudget
from worker.engine.pace import Pace
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, Status
from worker.unsound import no_numbers

if TYPE_CHECKING:
    from worker.engine.runner import Pending, Scores

log = logging.getLogger("engine")
T = TypeVar("T")

CLEAR_EVERY = 256
"""Steps between two releases of mlx's allocator cache (mlx-lm's cadence)."""


@dataclass(slots=True)
class Output:
    """What a step did to one sequence: admitted it, moved its prefill, gave a token; perhaps ended it.

    `serial` is the sequence's: its id may be another one's by the time that this is read.
    """

    id: str
    serial: int
    token: int | None = None
    admitted: bool = False
    reused: int = 0  # with `admitted`: prompt tokens from the prefix cache
    prefilled: int | None = None  # prompt tokens in the KV cache now
    scores: "Scores | None" = None  # with `token`, where the row asks for log-probabilities
    vector: bytes | None = None  # the end of a text that was only read: float32, as the machine has it
    finish: FinishReason | None = None
    failure: Failure | None = None  # the end, of this sequence alone


OnOutputs = Callable[[list[Output]], None]


@dataclass(frozen=True)
class Loaded:
    """What the engine runs: a model (`worker.models`), its prefix cache, and the sizes of a step."""

    model: Any
    prefix: Any
    max_rows: int
    prefill_chunk: int
    kv: KvBudget = field(default_factory=KvBudget)  # of all rows
    check_prefix: bool = False  # compare every prompt that is taken up with one that is run whole
    store: Any = None  # `worker.cache.store.Store`, where kept prompts outlive the worker
    adapters: Any = None  # `worker.adapters.mount.Adapters`; None = the model takes none
    pooling: Any = (
        None  # `worker.embed.pooling.Head`: how hidden states become a vector; a `Failure`: why not
    )
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

    def step(self, work: Callable[[], T]) -> "Future[T]":
        """The same as a step of its own, counted and timed: for models that do not decode."""

        def run() -> T:
            self._step_began = time.monotonic()
            try:
                return work()
            finally:
                self._step_began = None
                self._chunks += 1
                self._count()
                self._measure()

        return self.call(run)

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
        """Have all that is kept on disk, where the load provided for it; gives the bytes that lie there then."""

        def write() -> int:
            loaded = self._loaded
            if loaded is None or loaded.store is None:
                return 0
            for entry in loaded.prefix.newest_first():
                if should_stop() or not loaded.store.has_room():
                    break
                loaded.store.offer(entry.ids, entry.regime, entry.caches, entry.checkpoints)
            return int(loaded.store.flush(should_stop))

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

    def lookups(self) -> "Future[tuple[list[Lookup], int, int]]":
        """The newest lookups of kept prompts, oldest first; entries kept, and their cap in bytes."""

        def read() -> tuple[list[Lookup], int, int]:
            if self._loaded is None:
                return [], 0, 0
            prefix = self._loaded.prefix
            return list(prefix.lookups), len(prefix), prefix.max_bytes

        return self.call(read)

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
            restored_bytes=loaded.store.restored_bytes if loaded and loaded.store else 0,
            disk_bytes=loaded.store.disk_bytes if loaded and loaded.store else 0,
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
            if self._loaded is not None and self._loaded.store is not None:
                self._loaded.store.close()
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
        model, scheduler, start_waits = self._loaded.model, self._scheduler, runner.start_waits()
        adapters = self._loaded.adapters
        selection = adapters.selection if adapters is not None and adapters.any_held else None
        pending: runner.Pending | None = None
        while True:
            if not self._take(wait=False):
                return
            outputs = [output for sequence in scheduler.admit() for output in self._admit(sequence)]
            chunk = scheduler.prefill_chunk
            decoding, prefilling = scheduler.num_decode, scheduler.num_prefill
            step = scheduler.schedule(self._pace.budget(chunk, decoding, prefilling) if decoding else chunk)
            for old, again in step.preempted:
                self._sequences[old.id] = again
                self._keep(old)
            if not step and pending is None:
                self._emit(outputs)
                self._step_began = None
                if not scheduler.has_work:
                    return
                if not self._take():  # rows there are wait for the disk
                    return
                continue
            self._step_began = time.monotonic()
            self._emit(outputs)
            begun = runner.build(model, step, selection) if step else None
            if pending is not None and start_waits:
                self._finish(pending)
            if begun is not None:
                runner.start(begun)
            if pending is not None and not start_waits:
                self._finish(pending)
            if begun is not None:
                runner.finish(begun)  # a grammar has seen the tokens before by now
            if begun is not None and begun.chunk:
                self._finish(begun)  # nothing is built on a prompt that is not through: see design.md
                begun = None
            self._emit([Output(row.id, row.serial, prefilled=row.num_cached) for row, _ in step.prefill])
            self._chunks += len(step.prefill)
            for row, _ in step.prefill:
                if row.num_cached in row.marks:
                    row.checkpoints[row.num_cached] = checkpoint_of(row.caches or [])
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
        """Give a new row its caches, from what is kept as far as that goes; one token is left to run.

        Where the disk has more of its prompt than memory has, the row waits for it and the others go on.
        """
        assert self._loaded is not None
        loaded = self._loaded
        if sequence.pooler is not None:  # what it does not run it does not see
            return self._begin(sequence, None, None)
        branch, lookup = loaded.prefix.take(sequence.prompt, sequence.namespace)
        if loaded.store is not None:
            regime = loaded.prefix.key(len(sequence.prompt), sequence.namespace)
            found = loaded.store.find(sequence.prompt, regime, lookup.reused)
            if found.tokens > lookup.reused:
                sequence.status = Status.RESTORING

                def restored(good: Any) -> None:
                    self._inbox.put(lambda: self._restored(sequence, branch, lookup, good))

                loaded.store.fetch(found, restored)
                return []
        return self._begin(sequence, branch, lookup)

    def _restored(self, sequence: Sequence, branch: Branch | None, lookup: Lookup, good: Any) -> None:
        """The disk has been read; what came of it may be less than was hoped for."""
        assert self._loaded is not None
        if sequence.status is not Status.RESTORING:
            return
        sequence.status = Status.PREFILL
        tokens, problem = 0, good.problem
        if good.tokens > lookup.reused:
            caches = self._loaded.model.make_caches(len(sequence.prompt))
            tokens = self._loaded.store.build(good, caches, len(sequence.prompt))
            if tokens:
                branch = Branch(caches, {tokens: checkpoint_of(caches)})
            else:
                problem = "what was on disk could not be used, the log says why"
        self._emit(self._begin(sequence, branch, asked_of_disk(lookup, tokens, problem)))

    def _begin(self, sequence: Sequence, branch: Branch | None, lookup: Lookup | None) -> list[Output]:
        """Nobody hears of an admission after the first, which a row has that was preempted."""
        assert self._loaded is not None
        reused, common = 0, 0
        if lookup is not None:
            reused, common = lookup.reused, lookup.common
            self._loaded.prefix.lookups.append(lookup)
        if branch is None:
            branch = Branch(self._loaded.model.make_caches(len(sequence.prompt)), {})
        sequence.caches, sequence.checkpoints = branch.caches, dict(branch.checkpoints)
        sequence.num_cached = sequence.num_reused = reused
        if self._loaded.check_prefix and reused:
            from worker.engine.recheck import recheck

            chunk = self._loaded.prefill_chunk
            if self._loaded.adapters is not None:
                self._loaded.adapters.selection.choose([(sequence.adapters, 1)])
            recheck(self._loaded.model, sequence.id, sequence.prompt, branch.caches, reused, chunk)
        if sequence.pooler is None and not all(cache.goes_back for cache in branch.caches):
            sequence.marks = marks_of(len(sequence.prompt), reused, common)
        if sequence.is_told:
            return []
        sequence.is_told = True
        return [Output(sequence.id, sequence.serial, admitted=True, reused=reused)]

    def _update(self, pending: "Pending") -> list[Output]:
        """Read the tokens of a step and book them; rows that ended meanwhile are passed over."""
        outputs: list[Output] = []
        tokens, scores = pending.read(), pending.scores()
        for place, (row, token) in enumerate(zip(pending.rows, tokens, strict=True)):
            if row.status is Status.FINISHED:
                continue
            if problem := self._problem(row, token):
                outputs.append(self._fail(row, *problem))
                continue
            row.generated.append(token)
            self._tokens += 1
            output = Output(row.id, row.serial, token=token, scores=scores.get(place))
            if token in row.eos:
                output.finish = "stop"
            else:
                if row.constraint is not None:
                    row.constraint.accept(token)
                    output.finish = "stop" if row.constraint.is_complete else None
                if output.finish is None and row.num_generated >= row.max_tokens:
                    output.finish = "length"
            if output.finish:
                self._end(row)
            outputs.append(output)
        for row, vector in pending.vectors:
            if row.status is not Status.FINISHED:
                outputs.append(self._read(row, vector))
        return outputs

    def _read(self, row: Sequence, vector: Any) -> Output:
        """A text that was only read is through."""
        found = bytes(memoryview(vector))
        if not math.isfinite(sum(memoryview(found).cast("f"))):
            return self._fail(row, ErrorCode.ENGINE_FAULT, self._no_numbers("the model's hidden states"))
        self._end(row)
        return Output(row.id, row.serial, vector=found)

    def _problem(self, row: Sequence, token: int) -> tuple[ErrorCode, str] | None:
        """Why a row ends here without an answer. A grammar that is too much is its client's to change."""
        if row.constraint is not None and row.constraint.failure:
            return (
                ErrorCode.INVALID_REQUEST,
                f"its grammar cannot be matched any further, make it smaller: {row.constraint.failure}",
            )
        if token < 0:
            what = f"the model's logits for answer token {row.num_generated + 1}"
            return ErrorCode.ENGINE_FAULT, self._no_numbers(what)
        return None

    def _no_numbers(self, what: str) -> str:
        assert self._loaded is not None
        return no_numbers(what, self._loaded.description.get("dtype", ""))

    def _fail(self, row: Sequence, code: ErrorCode, problem: str) -> Output:
        """End a row that cannot go on; its KV may be what is wrong with it, and is not kept."""
        row.caches = None
        self._end(row)
        event(log, "engine.row_failed", level=logging.ERROR, request_id=row.id, reason=problem)
        return Output(row.id, row.serial, failure=Failure(code, f"request {row.id}: {problem}"))

    def _add(self, sequence: Sequence) -> None:
        assert self._scheduler is not None
        assert self._loaded is not None
        if sequence.adapters:
            try:
                sequence.namespace = self._loaded.adapters.acquire(sequence.adapters)
            except Refused as refused:  # unmounted since it was asked for
                self._emit([Output(sequence.id, sequence.serial, failure=refused.failure)])
                return
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)

    def _cancel(self, sequence_id: str) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
            self._emit([Output(sequence_id, sequence.serial, finish="cancelled")])

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        assert self._scheduler is not None
        self._scheduler.remove(sequence)
        if self._sequences.get(sequence.id) is sequence:
            del self._sequences[sequence.id]
        self._keep(sequence)
        if sequence.adapters and self._loaded is not None:
            self._loaded.adapters.release(sequence.adapters)
            sequence.adapters = ()

    def _keep(self, sequence: Sequence) -> None:
        """Keep the KV of a row that has left for the next request that begins alike."""
        assert self._loaded is not None
        if sequence.caches is not None and sequence.num_cached and sequence.pooler is None:
            ids, caches = sequence.cached_ids, sequence.caches
            self._loaded.prefix.put(ids, caches, sequence.checkpoints, sequence.namespace)
            if self._loaded.store is not None:
                regime = self._loaded.prefix.key(max(len(ids), caches[0].planned), sequence.namespace)
                self._loaded.store.offer(ids, regime, caches, sequence.checkpoints)
        sequence.caches = sequence.token = None
        sequence.checkpoints = {}

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
