"""Prompts on disk: blocks that outlive the worker and the machine's restart, written behind the engine's back.

One folder a model, a file a block (`block_file`), named by the chain of the blocks before it (`chain`), so that
conversations that begin alike share files. The engine thread hands over copies of what is new (`offer`), a thread of
our own writes them; another one reads and checks what a prompt could use (`fetch`), and the engine makes caches of it
(`build`). `max_bytes` bounds the folders of all models together, the least recently used blocks go first, ends of a
chain before its beginning; `floor_bytes` of the disk stay free. A block that is not as it was written is put aside
and computed again. Whatever goes wrong here is a line in the log: kept prompts are a matter of speed alone.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared.checkpoint import Checkpoint
from shared.logs import event
from worker.cache import block_file, folder
from worker.cache.block_file import Damaged, Kind, Tensor, Write
from worker.cache.chain import BLOCK, chain
from worker.cache.kv import LayerState
from worker.cache.layers import empty_like

log = logging.getLogger("cache")

BEHIND_BYTES = 512 << 20
"""Copies that may wait to be written; what is more is not kept on disk."""

SPILL_S = 10.0
"""A drain has 30 s in all, and the answers in flight come first."""

_DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}


FORMAT = 3
"""To be raised when the meaning of a file changes: older ones are then other models' to us."""


def identity_of(checkpoint: Checkpoint, *facts: object) -> str:
    """Of the KV that a model computes: its files by name, size and time of change, and `facts` (dtype, device).

    The chat template is none of it: the ids of a block say what was asked. Raises OSError.
    """
    digest = blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json", *(shard.file for shard in checkpoint.shards)):
        stat = (Path(checkpoint.path) / name).stat()
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    digest.update(repr((FORMAT, *facts)).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Found:
    """What of a prompt lies on disk: its blocks in order, and the state after the last of them if there is one."""

    tokens: int
    blocks: list[Path]
    state: Path | None = None
    layers: Mapping[int, LayerState] = field(default_factory=dict)  # of the state, once it was read
    problem: str = ""  # why it is less than was found by name


@dataclass(frozen=True)
class _Job:
    block: str
    kind: Kind
    layers: dict[int, LayerState]
    tensors: list[Tensor]
    age: int  # in blocks from the end of its chain: later ones are older


class Store:
    """The folder of one model. `goes_back`: of its layers' caches. `put` and `free_bytes` are for tests."""

    def __init__(
        self,
        path: Path,
        identity: str,
        goes_back: Sequence[bool],
        *,
        max_bytes: int,
        floor_bytes: int,
        put: Write = os.write,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self.path, self.identity = path, identity
        self.restored_bytes = 0
        self._short = identity[:8]
        self._keeps_kv, self._keeps_state = any(goes_back), not all(goes_back)
        self._floor_bytes = floor_bytes
        self._put, self._free_bytes = put, free_bytes
        self._lock = threading.Lock()
        self._files: dict[tuple[str, Kind], Path] = {}
        self._queued: set[tuple[str, Kind]] = set()
        self._queued_bytes = 0
        self._idle = threading.Condition(self._lock)
        self._stopped = False
        self._room = folder.Room(path.parent, max_bytes)
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._scan()

    @property
    def disk_bytes(self) -> int:
        """What lies here of this state of the model."""
        return self._room.bytes_in(self.path)

    def find(self, ids: Sequence[int], regime: Hashable, beyond: int = 0) -> Found:
        """What of `ids`, their last one left out, lies on disk by the names of the files, if that may be more than the
        `beyond` tokens that are there already.
        """
        whole = max(0, len(ids) - 1) // BLOCK
        if whole * BLOCK <= beyond or not self._files:
            return Found(0, [])
        names = chain(self.identity, regime, ids[: whole * BLOCK])
        with self._lock:
            count = len(names)
            if self._keeps_kv:
                count = next((n for n, name in enumerate(names) if (name, "kv") not in self._files), count)
            if self._keeps_state:
                while count and (names[count - 1], "state") not in self._files:
                    count -= 1
            blocks = [self._files[name, "kv"] for name in names[:count]] if self._keeps_kv else []
            state = self._files[names[count - 1], "state"] if count and self._keeps_state else None
        return Found(count * BLOCK, blocks, state)

    def fetch(self, found: Found, on_done: Callable[[Found], None]) -> None:
        """Read and check what was found, in a thread; `on_done` is called there with what of it can be used."""

        def read() -> None:
            try:
                good = self._checked(found)
            except Exception:
                log.exception("store.read")
                good = Found(0, [], problem="the disk could not be read, the log says why")
            on_done(good)

        self._reader.submit(read)

    def build(self, found: Found, caches: list[Any], planned: int) -> int:
        """Fill empty `caches` with what `fetch` gave -> tokens in them; 0 where it is gone. On the engine thread."""
        paths = [*found.blocks, *([] if found.state is None else [found.state])]
        loaded = {path: arrays for path in paths if (arrays := self._loaded(path)) is not None}
        if len(loaded) < len(paths):
            return 0
        try:
            for place, cache in enumerate(caches):
                if cache.goes_back:
                    cache.assemble([_parts(loaded[path], place) for path in found.blocks], BLOCK)
            if found.state is not None:
                for place, state in found.layers.items():
                    caches[place] = empty_like(state)
                    caches[place].fill(_parts(loaded[found.state], place))
            shapes = [[list(array.shape) for array in cache.arrays()] for cache in caches]
            fit = (cache.holds(each) for cache, each in zip(caches, shapes, strict=True))
            if any(cache.offset != found.tokens for cache in caches) or not all(fit):
                raise ValueError("the blocks do not hold what their names say")
            mx.eval([array for cache in caches for array in cache.arrays()])
        except (ValueError, KeyError, IndexError) as error:  # no file is damaged, and one of them is wrong
            for path in paths:
                self._put_aside(path, _first_line(error))
            return 0
        except RuntimeError as error:
            event(log, "store.unusable", level=logging.WARNING, reason=_first_line(error))
            return 0
        for cache in caches:
            cache.planned = planned
        self.restored_bytes += sum(cache.nbytes for cache in caches)
        return found.tokens

    def _loaded(self, path: Path) -> dict[str, mx.array] | None:
        """The arrays of a file, which are read when they are needed; None where that cannot be, and it is put aside."""
        try:
            return _load(path)
        except RuntimeError as error:
            if path.exists():
                self._put_aside(path, _first_line(error))
            else:
                event(log, "store.unusable", level=logging.WARNING, reason=_first_line(error))
                self._forget(path)
            return None

    def offer(
        self, ids: Sequence[int], regime: Hashable, caches: list[Any], checkpoints: Mapping[int, list[Any]]
    ) -> None:
        """Have what is not here yet written. On the engine thread, which copies it for that."""
        names = chain(self.identity, regime, ids)
        states = {at: point for at, point in checkpoints.items() if at % BLOCK == 0 and at <= len(ids)}
        if len(ids) % BLOCK == 0:
            states[len(ids)] = [None if cache.goes_back else cache for cache in caches]
        last = len(names) if self._keeps_kv else 0
        jobs: list[tuple[str, Kind, dict[int, LayerState], dict[str, mx.array], int]] = []
        for number, name in enumerate(names):
            age = len(names) - number
            if number < last and self._claim(name, "kv"):
                arrays = _piece(caches, number * BLOCK, (number + 1) * BLOCK)
                jobs.append((name, "kv", {}, arrays, age))
            point = states.get((number + 1) * BLOCK) if self._keeps_state else None
            if point and self._claim(name, "state"):
                kept = {place: _cut(cache) for place, cache in enumerate(point) if cache is not None}
                layers = {place: cache.state() for place, cache in kept.items()}
                arrays = {f"{p}.{n}": a for p, c in kept.items() for n, a in enumerate(c.arrays())}
                jobs.append((name, "state", layers, arrays, age))
        if jobs:
            self._submit([_Job(n, k, layers, _tensors(arrays), age) for n, k, layers, arrays, age in jobs])
        elif names:
            self._writer.submit(self._touch, names)

    def flush(self, should_stop: Callable[[], bool], limit_s: float = SPILL_S) -> int:
        """Wait until all is written, for `limit_s` at most and until the engine is wanted -> bytes that lie here."""
        until = time.monotonic() + limit_s
        with self._lock:
            while self._queued and not should_stop():
                left = until - time.monotonic()
                if left <= 0:
                    event(log, "store.slow", level=logging.WARNING, waiting_bytes=self._queued_bytes)
                    break
                self._idle.wait(min(left, 0.1))
        return self.disk_bytes

    def has_room(self) -> bool:
        """Whether more may be offered without being dropped."""
        return self._queued_bytes < BEHIND_BYTES

    def close(self) -> None:
        """Write no more; what is being written is left unfinished."""
        self._stopped = True
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._reader.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ the writer's thread

    def _submit(self, jobs: list[_Job]) -> None:
        size = sum(block_file.size_of(job.tensors) for job in jobs)
        with self._lock:
            self._queued_bytes += size

        def done(future: "Future[None]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                event(log, "store.stopped", level=logging.WARNING, folder=str(self.path), reason=str(error))
            with self._lock:
                self._queued_bytes -= size
                self._queued -= {(job.block, job.kind) for job in jobs}
                self._idle.notify_all()

        self._writer.submit(self._write, jobs).add_done_callback(done)

    def _write(self, jobs: list[_Job]) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = time.time_ns()
        for job in jobs:
            size = block_file.size_of(job.tensors)
            self._room.make(size, self._forget)
            while self._free_bytes(self.path) - size < self._floor_bytes:
                if not self._room.drop_oldest(self._forget):
                    raise OSError(f"the disk has not {size} bytes above the floor of {self._floor_bytes}")
            path = block_file.write(
                self.path,
                self._short,
                job.block,
                job.kind,
                job.layers,
                job.tensors,
                put=self._put,
                check=self._check,
            )
            self._room.add(path, path.stat().st_size, now + job.age * 1000)
            with self._lock:
                self._files[job.block, job.kind] = path

    def _check(self) -> None:
        if self._stopped:
            raise OSError("the worker leaves")

    def _touch(self, names: list[str]) -> None:
        now = time.time_ns()
        for number, name in enumerate(names):
            for kind in ("kv", "state"):
                with self._lock:
                    path = self._files.get((name, kind))
                if path is not None:
                    self._room.touch(path, now + (len(names) - number) * 1000)

    # ------------------------------------------------------------ the reader's thread

    def _checked(self, found: Found) -> Found:
        """As far as every block is what it was. All are looked at: what is damaged behind the first one is put aside
        too, and written again when the row ends.
        """
        problems: list[tuple[int, str]] = []  # number of the block, what is wrong with it
        layers: dict[int, LayerState] = {}
        for number, path in enumerate(found.blocks):
            try:
                self._verified(path)
            except Damaged as error:
                where = f"tokens {number * BLOCK} to {(number + 1) * BLOCK}"
                problems.append((number, f"a block on disk {error} ({where})"))
        if found.state is not None:
            try:
                layers = self._verified(found.state)
            except Damaged as error:
                problems.append((len(found.blocks), f"the state after {found.tokens} tokens on disk {error}"))
        if not problems:
            return Found(found.tokens, found.blocks, found.state, layers)
        good, problem = problems[0]
        if len(problems) > 1:
            problem += f", and {len(problems) - 1} more of the prompt"
        if self._keeps_state:
            good = 0  # a state fits its own place only; the next prompt will find what is left
        return Found(good * BLOCK, found.blocks[:good], problem=problem)

    def _verified(self, path: Path) -> dict[int, LayerState]:
        """Raises `Damaged`, in words that follow on "the block"; it is put aside then."""
        name = block_file.parse(path.name)
        assert name is not None
        try:
            return block_file.verify(path, name.digest)
        except FileNotFoundError:
            self._forget(path)
            raise Damaged("is gone") from None
        except (OSError, Damaged) as error:
            self._put_aside(path, str(error))
            raise Damaged(f"was damaged: {error}") from None

    # ------------------------------------------------------------ any thread

    def _put_aside(self, path: Path, reason: str) -> None:
        """It will not be found again, and is to be written again."""
        self._forget(path)
        folder.put_aside(path, reason)

    def _claim(self, name: str, kind: Kind) -> bool:
        """Whether a block is to be written: it is neither here nor on its way, and there is room for it in line."""
        with self._lock:
            key = (name, kind)
            if key in self._files or key in self._queued or self._queued_bytes >= BEHIND_BYTES:
                return False
            self._queued.add(key)
            return True

    def _forget(self, path: Path) -> None:
        name = block_file.parse(path.name)
        if name is not None:
            with self._lock:
                if self._files.get((name.block, name.kind)) == path:
                    del self._files[name.block, name.kind]

    def _scan(self) -> None:
        try:
            for path in self._room.open(self.path, self._short):
                name = block_file.parse(path.name)
                if name is not None:
                    self._files[name.block, name.kind] = path
        except OSError as error:
            event(log, "store.unreadable", level=logging.WARNING, folder=str(self.path), reason=str(error))


def _piece(caches: list[Any], begin: int, end: int) -> dict[str, mx.array]:
    """The tokens `begin:end` of the layers that keep every token."""
    return {
        f"{place}.{number}": array
        for place, cache in enumerate(caches)
        if cache.goes_back
        for number, array in enumerate(cache.piece(begin, end))
    }


def _cut(cache: Any) -> Any:
    clone = cache.clone()
    clone.cut()
    return clone


def _tensors(arrays: Mapping[str, mx.array]) -> list[Tensor]:
    """Copies in host memory that any thread may read."""
    copies = {name: mx.contiguous(array) for name, array in arrays.items()}
    views = {name: array.view(mx.uint8) for name, array in copies.items()}
    mx.eval(list(views.values()))
    return [
        Tensor(name, _DTYPES[arrays[name].dtype], tuple(arrays[name].shape), _bytes_of(view))
        for name, view in views.items()
    ]


def _bytes_of(array: Any) -> memoryview:
    """The memory of an evaluated array; Any because mlx does not say that it has one."""
    return memoryview(array).cast("B")


def _load(path: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(path), format="safetensors")
    assert isinstance(loaded, dict)
    return loaded


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _parts(arrays: Mapping[str, mx.array], place: int) -> list[mx.array]:
    """The arrays of one layer, in order."""
    found: list[mx.array] = []
    while (one := arrays.get(f"{place}.{len(found)}")) is not None:
        found.append(one)
    return found
