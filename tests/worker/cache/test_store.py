"""Prompts on disk: what is found again, under caps and floors, with damaged files, full disks and others' files."""

import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv_layout import LayerKv
from shared.logs import Plain
from worker.cache import block_file, store
from worker.cache.block_file import parse
from worker.cache.chain import BLOCK, chain
from worker.cache.layers import make_caches
from worker.cache.prefix import checkpoint_of
from worker.cache.store import Found, Store

CAP = 1 << 30
FULL, QUANTIZED, SPLIT = LayerKv(2, 64), LayerKv(2, 64, bits=8), LayerKv(2, 64, bits=4, plain=128)
WINDOW, RECURRENT = LayerKv(2, 64, window=40), LayerKv(0, 0, state=8, state32=8)
LAYOUTS = {
    "full": [FULL, FULL],
    "quantized": [FULL, QUANTIZED, SPLIT],
    "window": [WINDOW],
    "mixed": [RECURRENT, FULL, WINDOW, SPLIT],
}


def ids_of(seed: int, count: int) -> list[int]:
    return [seed * 10_000 + n for n in range(count)]


def caches_of(layout: list[LayerKv], ids: list[int], marks: tuple[int, ...] = ()) -> tuple[list, dict]:
    """Caches that have seen `ids`, and checkpoints; what they hold of a token depends on its id alone."""
    caches, points = make_caches(layout, len(ids)), {}
    cuts = sorted({*range(0, len(ids), 50), *marks, len(ids)})
    for begin, end in itertools.pairwise(cuts):
        for place, (layer, cache) in enumerate(zip(layout, caches, strict=True)):
            x = mx.array(ids[begin:end], mx.float32)[None, None, :, None] * (place + 1)
            if layer.is_recurrent:
                total = mx.array([[float(sum(ids[:end]))] * 8])
                cache.advance(end - begin, [total, total * 2])
            else:
                keys = mx.sin(x + mx.arange(64)) + mx.zeros((1, 2, 1, 1))
                cache.update(keys, -keys)
        if end in marks:
            points[end] = checkpoint_of(caches)
    mx.eval([array for cache in caches for array in cache.arrays()])
    return caches, points


def seen(caches: list) -> list[np.ndarray]:
    """What the layers would get for one more token."""
    found = []
    for cache in caches:
        if hasattr(cache, "states"):
            found += [np.array(one) for one in cache.states]
        else:
            more = mx.ones((1, 2, 1, 64))
            for held in cache.clone().update(more, more):
                found.append(np.array(held if isinstance(held, mx.array) else held.plain()))
    return found


def told(caplog: pytest.LogCaptureFixture) -> str:
    """Everything that was logged, as people read it."""
    return "\n".join(Plain().format(record) for record in caplog.records)


class Folder:
    """A folder of one model, and the stores that open it after each other."""

    def __init__(self, path: Path, layout: str = "full", **options) -> None:
        self.path, self.layout, self.options = path, LAYOUTS[layout], options
        self.open: list[Store] = []

    def store(self, identity: str = "0123456789", **more) -> Store:
        goes_back = [cache.goes_back for cache in make_caches(self.layout)]
        options = {"max_bytes": CAP, "floor_bytes": 0, **self.options, **more}
        self.open.append(Store(self.path, identity, goes_back, **options))
        return self.open[-1]

    def keep(self, ids: list[int], *marks: int, **more) -> Store:
        """Have them written by a store of their own."""
        kept = self.store(**more)
        caches, points = caches_of(self.layout, ids, marks)
        kept.offer(ids, 0, caches, points)
        kept.flush(lambda: False)
        return kept

    def back(self, kept: Store, ids: list[int]) -> tuple[int, list]:
        """-> (tokens that come back of a prompt, the caches with them)."""
        done: list[Found] = []
        ready = threading.Event()

        def on_done(found: Found) -> None:
            done.append(found)
            ready.set()

        found = kept.find(ids, 0)
        if not found.tokens:
            return 0, []
        kept.fetch(found, on_done)
        assert ready.wait(20)
        caches = make_caches(self.layout)
        return (kept.build(done[0], caches, len(ids)), caches) if done[0].tokens else (0, [])

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def close(self) -> None:
        for each in self.open:
            each.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def build(layout: str = "full", name: str = "model", **options) -> Folder:
        made.append(Folder(tmp_path / "kv" / name, layout, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("count", "asked", "back"), [(200, 200, 128), (200, 500, 128), (256, 500, 256)])
def test_another_store_finds_what_one_has_written(make, layout, count, asked, back):
    folder = make(layout)
    ids = ids_of(1, count)
    folder.keep(ids, 64, 128)
    if layout in ("full", "quantized"):
        back = min(count, asked - 1) // BLOCK * BLOCK
    tokens, caches = folder.back(folder.store(), [*ids, *ids_of(2, 300)][:asked])
    assert tokens == back
    assert all(cache.offset == back and cache.planned == asked for cache in caches)
    wanted, _ = caches_of(folder.layout, ids[:back])
    for one, other in zip(seen(caches), seen(wanted), strict=True):
        assert np.allclose(one, other, atol=1e-6)


def test_prompts_that_begin_alike_share_their_files(make):
    folder = make()
    folder.keep(ids_of(1, 256))
    assert len(folder.files()) == 4
    kept = folder.keep([*ids_of(1, 128), *ids_of(2, 128)])
    assert len(folder.files()) == 6
    assert kept.disk_bytes == sum(path.stat().st_size for path in folder.files())
    assert folder.back(kept, [*ids_of(1, 256), 0])[0] == 256
    assert folder.back(kept, [*ids_of(1, 128), *ids_of(2, 128), 0])[0] == 256


def test_nothing_is_written_twice(make):
    folder = make()
    kept = folder.keep(ids_of(1, 256))
    before = {path: path.stat().st_ino for path in folder.files()}
    caches, _ = caches_of(folder.layout, ids_of(1, 256))
    kept.offer(ids_of(1, 256), 0, caches, {})
    kept.flush(lambda: False)
    assert {path: path.stat().st_ino for path in folder.files()} == before


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
    st.integers(0, BLOCK),
)
@settings(max_examples=50)
def test_names_are_shared_as_far_as_blocks_are(one, other, rest):
    """Each number stands for a block of its own kind."""
    a = chain("me", 0, [n for n in one for _ in range(BLOCK)] + [9] * (rest % BLOCK))
    b = chain("me", 0, [n for n in other for _ in range(BLOCK)])
    assert len(a) == len(one)
    shared = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
    shared = min(len(one), len(other)) if shared is None else shared
    assert [x == y for x, y in zip(a, b, strict=False)] == [n < shared for n in range(min(len(a), len(b)))]
    assert not {*a} & {*chain("you", 0, [n for n in one for _ in range(BLOCK)])}
    assert not {*a} & {*chain("me", 1, [n for n in one for _ in range(BLOCK)])}


# ---------------------------------------------------------------- room


def test_the_cap_holds_over_the_folders_of_all_models_and_the_unused_go_first(make):
    size = (
        len(make(name="probe").keep(ids_of(1, 64)).path.name) and make(name="probe").files()[0].stat().st_size
    )
    make(name="probe").files()[0].unlink()
    cap = int(size * 10.5)
    one, two = make(name="one", max_bytes=cap), make(name="two", max_bytes=cap)
    one.keep(ids_of(1, 4 * 64))
    one.keep(ids_of(2, 4 * 64))
    assert one.back(one.store(), [*ids_of(1, 4 * 64), 0])[0] == 4 * 64
    caches, _ = caches_of(one.layout, ids_of(1, 4 * 64))
    touching = one.store()
    touching.offer(ids_of(1, 4 * 64), 0, caches, {})  # used again: the other is older now
    touching.close()
    two.keep(ids_of(3, 4 * 64))
    left = [*one.files(), *two.files()]
    assert sum(path.stat().st_size for path in left) <= cap
    assert len(two.files()) == 4
    assert one.back(one.store(), [*ids_of(1, 4 * 64), 0])[0] == 4 * 64
    assert one.back(one.store(), [*ids_of(2, 4 * 64), 0])[0] < 4 * 64


def test_of_a_chain_the_end_goes_before_the_beginning(make):
    folder = make()
    folder.keep(ids_of(1, 8 * 64))
    size = folder.files()[0].stat().st_size
    folder.keep(ids_of(2, 64), max_bytes=int(size * 6.5))
    assert 0 < folder.back(folder.store(), [*ids_of(1, 8 * 64), 0])[0] < 8 * 64


def test_the_floor_of_the_disk_is_kept(make, caplog):
    folder = make()
    folder.keep(ids_of(1, 128), free_bytes=lambda path: 0, floor_bytes=1)
    assert folder.files() == []
    assert "store.stopped" in told(caplog)


def test_a_block_greater_than_the_cap_is_not_written(make, caplog):
    folder = make(max_bytes=10)
    folder.keep(ids_of(1, 128))
    assert folder.files() == []
    assert "all that may be kept is 10" in told(caplog)


def test_a_full_disk_leaves_whole_files_only(make, caplog):
    folder = make()
    written = []

    def put(fd: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data[: max(1, len(data) // 2)])

    kept = folder.keep(ids_of(1, 640), put=put)
    assert "No space left" in told(caplog)
    assert all(parse(path.name) for path in folder.path.iterdir())
    count = len(folder.files())
    assert count < 10
    assert folder.back(folder.store(), [*ids_of(1, 640), 0])[0] == count * 64
    kept._put = os.write  # there is room again
    caches, _ = caches_of(folder.layout, ids_of(1, 640))
    kept.offer(ids_of(1, 640), 0, caches, {})
    kept.flush(lambda: False)
    assert len(folder.files()) == 10


def test_more_than_may_wait_is_not_copied(make, monkeypatch):
    monkeypatch.setattr(store, "BEHIND_BYTES", 1)
    folder = make()
    gate = threading.Event()

    def put(fd: int, data: memoryview) -> int:
        gate.wait(20)
        return os.write(fd, data)

    kept = folder.store(put=put)
    for seed in (1, 2):
        caches, _ = caches_of(folder.layout, ids_of(seed, 64))
        kept.offer(ids_of(seed, 64), 0, caches, {})
    assert not kept.has_room()
    gate.set()
    kept.flush(lambda: False)
    assert len(folder.files()) == 1


def test_a_flush_ends_when_the_engine_is_wanted_or_time_is_up(make, caplog):
    folder = make()
    gate = threading.Event()
    kept = folder.store(put=lambda fd, data: gate.wait(20) and os.write(fd, data))
    caches, _ = caches_of(folder.layout, ids_of(1, 64))
    kept.offer(ids_of(1, 64), 0, caches, {})
    assert kept.flush(lambda: True) == 0
    assert kept.flush(lambda: False, limit_s=0) == 0
    assert "store.slow" in told(caplog)
    gate.set()
    assert kept.flush(lambda: False) > 0


# ---------------------------------------------------------------- what lies there


def test_files_of_another_state_unfinished_ones_and_strangers(make):
    folder = make()
    folder.keep(ids_of(1, 64))
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    dead = folder.path / f"{block_file.PART}{int(child.stdout)}"
    mine = folder.path / f"{block_file.PART}{os.getpid()}"
    living = folder.path / f"{block_file.PART}{os.getppid()}"
    stranger = folder.path / "notes.txt"
    old = folder.path / f"{'a' * 32}.kv.safetensors"
    for path in (dead, mine, living, stranger, old):
        path.write_text("x")
    kept = folder.store(identity="another one")
    assert folder.files() == []
    assert sorted(folder.path.iterdir()) == sorted([living, stranger])
    assert kept.disk_bytes == 0


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "header", "empty", "gone", "another"])
@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_a_damaged_block_is_put_aside_and_what_comes_before_is_used(make, layout, damage, caplog):
    folder = make(layout)
    ids = ids_of(1, 256)
    folder.keep(ids, 64, 128)
    kept = folder.store()
    victim = kept._files[chain(kept.identity, 0, ids)[2 if layout == "full" else 1], "kv"]
    data = victim.read_bytes()
    changed = {
        "flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        "short": data[:-1],
        "long": data + b"x",
        "header": data[:4] + b"\xff" + data[5:],
        "empty": b"",
        "another": folder.files()[0].read_bytes() + b"x",
    }
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(changed[damage])
    tokens, _ = folder.back(kept, [*ids, 0])
    assert tokens == (128 if layout == "full" else 0)  # a state further on cannot be used without it
    if damage != "gone":
        assert [path.name for path in (folder.path / "damaged").iterdir()] == [victim.name]
        assert "checksum" in told(caplog)
    folder.keep(ids, 64, 128)
    assert folder.back(folder.store(), [*ids, 0])[0] == 256


@pytest.mark.parametrize(
    ("layout", "victims", "comes", "said"),
    [
        (
            "full",
            [(1, "kv"), (3, "kv")],
            64,
            "a block on disk was damaged: its checksum .* (tokens 64 to 128)",
        ),
        (
            "full",
            [(0, "kv"), (1, "kv"), (2, "kv"), (3, "kv")],
            0,
            "(tokens 0 to 64), and 3 more of the prompt",
        ),
        ("mixed", [(2, "kv"), (3, "kv"), (3, "state")], 0, "(tokens 128 to 192), and 2 more of the prompt"),
        ("mixed", [(3, "state")], 0, "the state after 256 tokens on disk was damaged: its checksum"),
        ("window", [(3, "state")], 0, "the state after 256 tokens on disk was damaged: its checksum"),
    ],
)
def test_all_blocks_that_are_damaged_are_put_aside_at_once_and_written_again(
    make, layout, victims, comes, said
):
    folder = make(layout)
    ids = ids_of(1, 256)
    folder.keep(ids, 64, 128)
    kept = folder.store()
    names = chain(kept.identity, 0, ids)
    paths = [kept._files[names[number], kind] for number, kind in victims]
    whole = folder.files()
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    found: list[Found] = []
    ready = threading.Event()

    def on_done(good: Found) -> None:
        found.append(good)
        ready.set()

    kept.fetch(kept.find([*ids, 0], 0), on_done)
    assert ready.wait(20)
    assert found[0].tokens == comes
    assert all(part in found[0].problem for part in said.split(" .* "))
    assert {path.name for path in (folder.path / "damaged").iterdir()} == {path.name for path in paths}
    caches, points = caches_of(folder.layout, ids, (64, 128))
    kept.offer(ids, 0, caches, points)
    kept.flush(lambda: False)
    assert folder.files() == whole
    assert kept.disk_bytes == sum(path.stat().st_size for path in whole)
    assert folder.back(folder.store(), [*ids, 0])[0] == 256


@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_blocks_that_are_whole_and_do_not_fit_are_put_aside_too(make, layout, caplog):
    """Their checksums are right: somebody else's program wrote them under our names."""
    folder, other = make(layout), make("quantized", "other")
    ids = ids_of(1, 128)
    other.keep(ids)
    folder.keep(ids)
    kept = folder.store()
    for path in folder.files():
        name = parse(path.name)
        strange = other.files()[0]
        digest = parse(strange.name).digest
        path.unlink()
        new = path.with_name(str(block_file.Name(name.identity, name.block, digest, name.kind)))
        new.write_bytes(strange.read_bytes())
    kept = folder.store()
    assert folder.back(kept, [*ids, 0])[0] == 0
    assert folder.files() == []
    assert "store.damaged" in told(caplog)
    folder.keep(ids)
    assert folder.back(folder.store(), [*ids, 0])[0] == 128


def test_blocks_that_vanish_after_they_were_checked_are_a_miss(make, caplog):
    folder = make()
    ids = ids_of(1, 128)
    kept = folder.keep(ids)
    found = kept.find([*ids, 0], 0)
    for path in folder.files():
        path.unlink()
    assert kept.build(found, make_caches(folder.layout), 129) == 0
    assert "store.unusable" in told(caplog)


def test_a_folder_that_cannot_be_made_keeps_nothing_and_harms_nothing(tmp_path, make, caplog):
    (tmp_path / "kv").write_text("a file is in the way")
    kept = make().keep(ids_of(1, 128))
    assert kept.disk_bytes == 0
    assert "store.stopped" in told(caplog)


def test_only_the_owner_may_look(make):
    folder = make()
    folder.keep(ids_of(1, 64))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.files()} == {0o600}


def test_a_store_that_is_closed_in_the_middle_leaves_no_part(make):
    folder = make()
    started, gate = threading.Event(), threading.Event()

    def put(fd: int, data: memoryview) -> int:
        started.set()
        gate.wait(20)
        return os.write(fd, data)

    kept = folder.store(put=put)
    caches, _ = caches_of(folder.layout, ids_of(1, 640))
    kept.offer(ids_of(1, 640), 0, caches, {})
    assert started.wait(20)
    kept._stopped = True
    gate.set()
    kept.close()
    assert all(parse(path.name) for path in folder.path.iterdir())
    assert len(folder.files()) < 10
