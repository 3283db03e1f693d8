"""The prefix cache on disk: what comes back is what was there; whatever is wrong with a file or a disk is survived."""

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from shared.checkpoint import inspect
from tests.oracles.checkpoints import write_case
from worker.cache import disk_file
from worker.cache.disk import Spill, identity_of
from worker.cache.kv import FullKV, RotatingKV
from worker.cache.prefix import PrefixCache

CAP = 1 << 30
WINDOW = 12
STAY = lambda: False  # noqa: E731


def caches(tokens: int, seed: int = 0) -> list:
    """One full and one rotating cache that have seen some tokens, in chunks and then one by one."""
    made = [FullKV(), RotatingKV(WINDOW)]
    cuts = [min(50, tokens), *[1] * max(0, tokens - 50)]
    for place, cache in enumerate(made):
        cache.planned = tokens
        for n, length in enumerate(cuts):
            key = mx.random.key(seed * 1000 + place * 100 + n)
            cache.update(*mx.random.normal((2, 1, 2, length, 4), key=key))
    mx.eval([array for cache in made for array in cache.arrays()])
    return made


def seen(cache) -> list:
    """What attention would get for one more token."""
    more = mx.ones((1, 2, 1, 4))
    return [array.tolist() for array in cache.clone().update(more, more)]


def prefix(max_bytes: int = CAP) -> PrefixCache:
    return PrefixCache(max_bytes, lambda length, other: True)


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def filled(*entries: tuple[int, int]) -> PrefixCache:
    """A prefix cache with an entry for every (first id, tokens), the newest last."""
    kept = prefix()
    for start, count in entries:
        kept.put(ids(start, count), caches(count, seed=start))
    return kept


def spill(folder: Path, identity: str = "me", **more) -> Spill:
    return Spill(folder, identity, **{"max_bytes": CAP, "floor_bytes": 0, **more})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


def restored(folder: Path, max_bytes: int = CAP, **more) -> PrefixCache:
    kept = prefix(max_bytes)
    assert spill(folder, **more).restore(kept) == kept.nbytes
    return kept


def hits(kept: PrefixCache, *entries: tuple[int, int]) -> list[int]:
    """Tokens found for a prompt that begins like each of the entries and goes on."""
    return [kept.take([*ids(start, count), 7, 7])[1] for start, count in entries]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "kv" / "model"


@pytest.mark.parametrize("tokens", [16, 50, 51, 70, 300])
def test_what_comes_back_is_what_was_there(folder, tokens):
    """Rotating caches before their window is full, after it, and after their buffer has moved."""
    kept = filled((0, tokens))
    before, _ = kept.take([*ids(0, tokens), 7])
    written = spill(folder).write(kept, STAY)
    assert written == sum(path.stat().st_size for path in files(folder))
    back = restored(folder)
    after, count = back.take([*ids(0, tokens), 7])
    assert count == tokens
    for one, other in zip(after, before, strict=True):
        assert seen(one) == seen(other)
        assert (one.offset, one.planned) == (other.offset, other.planned)
        for trimmed in range(tokens):
            assert one.can_trim(trimmed) == other.can_trim(trimmed)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_arrays_come_back_in_their_dtype(folder, dtype):
    kept = prefix()
    cache = FullKV()
    cache.update(*mx.random.normal((2, 1, 2, 30, 4)).astype(dtype))
    kept.put(ids(0, 30), [cache])
    spill(folder).write(kept, STAY)
    back, _ = restored(folder).take([*ids(0, 30), 7])
    assert [a.dtype for a in back[0].arrays()] == [dtype, dtype]
    assert all(mx.array_equal(a, b) for a, b in zip(back[0].arrays(), cache.arrays(), strict=True))


def test_nothing_is_read_but_headers_until_an_entry_is_used(folder):
    spill(folder).write(filled((0, 40), (1000, 40)), STAY)
    back = restored(folder)
    assert len(back) == 2
    assert all(not cache.arrays() for entry in back.newest_first() for cache in entry.caches)
    assert hits(back, (0, 40)) == [40]
    newest, other = back.newest_first()
    assert all(cache.arrays() for cache in newest.caches)
    assert not any(cache.arrays() for cache in other.caches)


def test_files_are_their_owners_alone_and_no_part_is_left(folder):
    spill(folder).write(filled((0, 40)), STAY)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (only,) = files(folder)
    assert stat.S_IMODE(only.stat().st_mode) == 0o600


def test_the_newest_entries_come_first_when_the_cap_is_short(folder):
    kept = filled((0, 300), (1000, 300), (2000, 300))
    kept.take([*ids(1000, 300), 7])  # in use: the newest now
    one = spill(folder).write(filled((0, 300)), STAY)
    spill(folder, max_bytes=int(2.2 * one)).write(kept, STAY)
    assert sum(path.stat().st_size for path in files(folder)) <= 2.2 * one
    assert hits(restored(folder), (0, 300), (1000, 300), (2000, 300)) == [0, 300, 300]
    assert hits(restored(folder, max_bytes=int(1.1 * one)), (1000, 300), (2000, 300)) == [300, 0]


def test_a_cap_that_came_down_deletes_the_oldest_files(folder):
    kept = filled((0, 300), (1000, 300))
    whole = spill(folder).write(kept, STAY)
    cap = int(whole * 0.6)
    assert spill(folder, max_bytes=cap).write(kept, STAY) <= cap
    assert hits(restored(folder), (0, 300), (1000, 300)) == [0, 300]


def test_the_floor_of_the_disk_stays_free(folder, caplog):
    kept = filled((0, 300), (1000, 300))
    size = spill(folder / "other").write(filled((0, 300)), STAY)

    def free(_: Path) -> int:
        """A disk with room for one and a half above the floor."""
        return 1000 + int(1.5 * size) - sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    spill(folder, floor_bytes=1000, free_bytes=free).write(kept, STAY)
    assert hits(restored(folder), (0, 300), (1000, 300)) == [0, 300]
    assert [record.message for record in caplog.records] == ["spill.stopped"]
    assert "above the floor of 1000" in caplog.records[0].fields["reason"]


def test_what_lies_there_already_is_not_written_again_and_outlives_a_crash(folder):
    spill(folder).write(filled((0, 40), (1000, 40)), STAY)
    before = {path: path.stat().st_ino for path in files(folder)}
    back = restored(folder)
    assert hits(back, (0, 40)) == [40]
    assert {path: path.stat().st_ino for path in files(folder)} == before  # a crash now loses nothing
    back.put(ids(2000, 40), caches(40))
    spill(folder).write(back, STAY)
    now = {path: path.stat().st_ino for path in files(folder)}
    assert len(now) == 3
    assert before.items() <= now.items()
    assert [e.ids[0] for e in restored(folder).newest_first()] == [2000, 0, 1000]


def test_a_longer_entry_takes_the_place_of_its_beginnings_file(folder):
    kept = prefix()
    full = FullKV()
    full.update(*mx.random.normal((2, 1, 2, 40, 4)))
    kept.put(ids(0, 40), [full])
    spill(folder).write(kept, STAY)
    back = restored(folder)
    (again,), _ = back.take(ids(0, 60))
    again.update(*mx.random.normal((2, 1, 2, 20, 4)))
    back.put(ids(0, 60), [again])
    assert len(back) == 1
    spill(folder).write(back, STAY)
    assert len(files(folder)) == 1
    assert hits(restored(folder), (0, 60)) == [60]


def test_what_memory_had_no_room_for_stays_on_disk_while_the_cap_allows(folder):
    size = spill(folder).write(filled((0, 300), (1000, 300)), STAY)
    small = restored(folder, max_bytes=size // 2 + 100)
    assert len(small) == 1
    small.put(ids(2000, 30), caches(30))
    spill(folder).write(small, STAY)
    assert len(files(folder)) == 3


def test_an_empty_cache_touches_nothing(folder):
    spill(folder).write(filled((0, 40)), STAY)
    assert spill(folder, identity="other").write(prefix(), STAY) == 0
    assert len(files(folder)) == 1
    assert spill(folder / "never").write(prefix(), STAY) == 0
    assert not (folder / "never").exists()


@pytest.mark.parametrize("max_bytes", [0, CAP], ids=["no prefix cache", "one"])
def test_a_folder_that_is_not_there_restores_nothing(folder, max_bytes, caplog):
    assert spill(folder).restore(prefix(max_bytes)) == 0
    assert not caplog.records


# ---------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte of an array": lambda path: flip(path, path.stat().st_size - 5),
    "a byte of the ids": lambda path: flip(path, path.read_bytes().index(b"[0,1,2,") + 6),
    "the length of the header": lambda path: flip(path, 1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 60),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "not safetensors": lambda path: path.write_bytes(os.urandom(500)),
    "no metadata": lambda path: mx.save_safetensors(str(path), {"0.0": mx.ones((1, 2, 40, 4))}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_deleted_with_one_line_and_the_others_are_used(folder, name, caplog):
    spill(folder).write(filled((0, 40)), STAY)
    (victim,) = files(folder)
    kept = filled((0, 40), (1000, 40))
    spill(folder).write(kept, STAY)
    DAMAGE[name](victim)
    back = prefix()
    spill(folder).restore(back)
    assert hits(back, (0, 40), (1000, 40)) == [0, 40]
    assert not victim.exists()
    assert len(files(folder)) == 1
    assert [record.message for record in caplog.records] == ["spill.discarded"]
    assert caplog.records[0].fields["file"] == str(victim)
    assert "\n" not in caplog.records[0].fields["reason"]
    assert back.nbytes == sum(entry.nbytes for entry in back.newest_first())


def test_a_file_that_vanishes_before_it_is_used_is_a_miss(folder):
    spill(folder).write(filled((0, 40)), STAY)
    back = restored(folder)
    for path in files(folder):
        path.unlink()
    assert hits(back, (0, 40)) == [0]
    assert (len(back), back.nbytes) == (0, 0)


def test_another_models_files_are_deleted_and_a_strangers_are_left_alone(folder, caplog):
    spill(folder, identity="other").write(filled((0, 40)), STAY)
    stranger = folder / "notes.txt"
    stranger.write_text("mine")
    (folder / f"{disk_file.PART}999999999").write_text("of a dead process")
    alive = folder / f"{disk_file.PART}{os.getppid()}"
    alive.write_text("of a live one")
    assert hits(restored(folder), (0, 40)) == [0]
    assert files(folder) == sorted([stranger, alive])
    assert [record.message for record in caplog.records] == ["spill.discarded"] * 2


def test_identity_follows_the_files_and_what_the_arrays_depend_on(tmp_path):
    model = write_case("llama_tied", tmp_path / "model")
    first = identity_of(inspect(model), "float32", "cpu")
    assert identity_of(inspect(model), "float32", "cpu") == first
    (model / "chat_template.jinja").write_text("another")
    assert identity_of(inspect(model), "float32", "cpu") == first
    assert identity_of(inspect(model), "float16", "cpu") != first
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = model / name
        before = path.stat()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
        assert identity_of(inspect(model), "float32", "cpu") != first
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity_of(inspect(model), "float32", "cpu") == first


# ---------------------------------------------------------------- disks


class Disk:
    """`os.write` of a disk that is full after some bytes."""

    def __init__(self, room: int, how: str = "ENOSPC") -> None:
        self.room, self.how = room, how

    def __call__(self, fd: int, data: memoryview) -> int:
        if len(data) <= self.room:
            self.room -= len(data)
            return os.write(fd, data)
        if self.how == "short" and self.room:
            written = os.write(fd, data[: self.room])
            self.room = 0
            return written
        if self.how == "nothing written":
            return 0
        code = getattr(errno, self.how, errno.ENOSPC)
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("how", ["ENOSPC", "EDQUOT", "EIO", "short", "nothing written"])
def test_a_disk_that_fails_in_the_middle_of_a_file_leaves_what_was_whole(folder, how, caplog):
    kept = filled((0, 300), (1000, 300), (2000, 300))
    size = spill(folder / "other").write(filled((0, 300)), STAY)
    written = spill(folder, put=Disk(int(1.6 * size), how)).write(kept, STAY)
    assert hits(restored(folder), (0, 300), (1000, 300), (2000, 300)) == [0, 0, 300]
    assert written == sum(path.stat().st_size for path in files(folder) if path.is_file())
    assert not list(folder.glob(f"{disk_file.PART}*"))
    assert [record.message for record in caplog.records] == ["spill.stopped"]


def test_a_full_disk_does_not_cost_what_lay_there(folder):
    spill(folder).write(filled((0, 40)), STAY)
    back = restored(folder)
    back.put(ids(1000, 300), caches(300))
    spill(folder, put=Disk(100)).write(back, STAY)
    assert hits(restored(folder), (0, 40), (1000, 300)) == [40, 0]


def test_the_devices_own_word_for_full_is_heard(folder):
    """`/dev/full` in the place of the file: a real ENOSPC, raised through mlx."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "wb", buffering=0) as full:
        spill(folder, put=lambda fd, data: os.write(full.fileno(), data)).write(filled((0, 40)), STAY)
    assert files(folder) == []


@pytest.mark.parametrize("why", ["a file in its place", "not writable"])
def test_a_folder_that_cannot_be_written_is_one_line(folder, why, caplog):
    if why == "not writable":
        folder.parent.mkdir()
        folder.parent.chmod(0o500)
        if os.access(folder.parent, os.W_OK):
            pytest.skip("this user may write everywhere")
    else:
        folder.parent.write_text("a file")
    kept = filled((0, 40))
    assert spill(folder).restore(prefix()) == 0
    assert spill(folder).write(kept, STAY) == 0
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "spill.stopped"
    ]
    assert hits(kept, (0, 40)) == [40]


def test_time_that_is_up_and_a_worker_that_is_wanted_stop_a_spill(folder, caplog):
    assert spill(folder, limit_s=0).write(filled((0, 40)), STAY) == 0
    assert spill(folder).write(filled((0, 40)), lambda: True) == 0
    asked = iter([False] * 4)  # before the entry, and between its pieces
    assert spill(folder).write(filled((0, 40)), lambda: next(asked, True)) == 0
    assert files(folder) == []
    reasons = [record.fields["reason"] for record in caplog.records]
    assert reasons == ["not done within 0 s", *["the worker goes on serving"] * 2]
