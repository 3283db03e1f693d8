"""Superseded snapshots of the hub's cache: what is planned is what goes, to the byte, and nothing else."""

import fcntl
import os
from pathlib import Path

import pytest

from parent.library.hf_cache import PULLING, snapshots
from parent.library.pruning import Pruned, RepoPlan, execute, plan
from tests.parent.hf_caches import HfCache

NEW, OLD, OLDER = "a" * 40, "b" * 40, "c" * 40
MODEL = "org/tiny"


def nothing(repo: str, commit: str, folder: Path) -> str:
    return ""


def rename(repo: str, commit: str, folder: Path, doomed: Path) -> bool:
    os.rename(folder, doomed)
    return True


def blobs(cache: HfCache, model: str = MODEL) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (cache.repo(model) / "blobs").iterdir()}


@pytest.fixture
def cache(tmp_path: Path) -> HfCache:
    """A model whose `main` has moved on twice; each commit has a file of its own beside those that all share."""
    cache = HfCache(tmp_path / "hub")
    for number, commit in enumerate((OLDER, OLD, NEW)):
        cache.commit(MODEL, commit, ref="main", at=number + 1)
        cache.file(MODEL, commit, "notes.txt", b"x" * (100 + number))
    return cache


def planned(cache: HfCache) -> RepoPlan:
    [found] = plan(cache.root, nothing)
    return found


def test_lab_gc_plans_what_newer_snapshots_have_taken_the_place_of(cache: HfCache) -> None:
    found = planned(cache)
    assert found.repo_id == MODEL
    assert found.prune_snapshots == [OLD, OLDER]
    assert found.skipped_snapshots == []
    assert found.reclaim_bytes == 100 + 101
    assert len(found.dead_blobs) == 2


def test_lab_gc_frees_what_it_planned_and_leaves_the_rest(cache: HfCache) -> None:
    before, found = blobs(cache), planned(cache)
    done = execute(cache.root, nothing, rename)
    after = blobs(cache)
    assert done == Pruned(2, 2, found.reclaim_bytes)
    assert sum(before.values()) - sum(after.values()) == found.reclaim_bytes
    assert before.keys() - after.keys() == set(found.dead_blobs)
    assert [each.commit for each in snapshots(cache.root)] == [NEW]
    assert [path.name for path in (cache.repo(MODEL) / "snapshots").iterdir()] == [NEW]
    assert not (cache.repo(MODEL) / PULLING).exists()
    assert (cache.snapshot(MODEL, NEW) / "notes.txt").read_bytes() == b"x" * 102
    assert plan(cache.root, nothing) == []
    assert execute(cache.root, nothing, rename) == Pruned()


def test_lab_gc_keeps_what_is_used_and_says_why(cache: HfCache) -> None:
    def used(repo: str, commit: str, folder: Path) -> str:
        assert (repo, folder) == (MODEL, cache.snapshot(MODEL, commit))
        return "in memory" if commit == OLD else ""

    [found] = plan(cache.root, used)
    assert found.prune_snapshots == [OLDER]
    assert [(one.commit, one.reason) for one in found.skipped_snapshots] == [(OLD, "in memory")]
    assert found.reclaim_bytes == 100
    assert execute(cache.root, used, rename) == Pruned(1, 1, 100)
    assert cache.snapshot(MODEL, OLD).is_dir()


def test_lab_gc_asks_once_more_in_the_last_moment(cache: HfCache) -> None:
    def aside(repo: str, commit: str, folder: Path, doomed: Path) -> bool:
        return commit != OLD and rename(repo, commit, folder, doomed)

    assert execute(cache.root, nothing, aside) == Pruned(1, 1, 100)
    assert cache.snapshot(MODEL, OLD).is_dir()


@pytest.mark.parametrize("ref", ["v1", "refs/pr/3"])
def test_lab_gc_keeps_what_a_ref_points_to(cache: HfCache, ref: str) -> None:
    cache.ref(MODEL, ref, OLD)
    assert planned(cache).prune_snapshots == [OLDER]


def test_lab_gc_leaves_a_repository_whose_newest_is_not_whole(cache: HfCache) -> None:
    (cache.snapshot(MODEL, NEW) / "config.json").unlink()
    assert plan(cache.root, nothing) == []
    cache.ref(MODEL, "main", "d" * 40)
    assert plan(cache.root, nothing) == []


def test_lab_gc_leaves_a_repository_without_a_default_branch(tmp_path: Path) -> None:
    cache = HfCache(tmp_path)
    cache.commit(MODEL, OLD)
    cache.commit(MODEL, NEW)
    assert plan(cache.root, nothing) == []
    assert plan(tmp_path / "nowhere", nothing) == []


def test_lab_gc_leaves_a_repository_that_is_downloaded_to(cache: HfCache) -> None:
    part = cache.incomplete(MODEL)
    found = planned(cache)
    assert (found.prune_snapshots, found.reclaim_bytes) == ([], 0)
    assert {one.reason for one in found.skipped_snapshots} == {
        "somebody downloads to this repository, or has stopped half-way"
    }
    assert execute(cache.root, nothing, rename) == Pruned()
    part.unlink()
    marker = cache.repo(MODEL) / PULLING
    with marker.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert planned(cache).prune_snapshots == []
        assert execute(cache.root, nothing, rename) == Pruned()
    assert marker.exists()  # of a pull that died: it says nothing
    assert planned(cache).reclaim_bytes == 201
    assert execute(cache.root, nothing, rename) == Pruned(2, 2, 201)


def test_lab_gc_counts_files_that_are_no_links(cache: HfCache) -> None:
    copied, linked = (cache.snapshot(MODEL, OLD) / name for name in ("copied.bin", "linked.bin"))
    copied.write_bytes(b"y" * 1000)
    os.link(cache.snapshot(MODEL, NEW).resolve() / "notes.txt", linked, follow_symlinks=True)
    (cache.snapshot(MODEL, OLD) / "dangling").symlink_to("../../blobs/none")
    assert planned(cache).reclaim_bytes == 100 + 101 + 1000
    assert execute(cache.root, nothing, rename).reclaimed_bytes == 1201
    assert (cache.snapshot(MODEL, NEW) / "notes.txt").stat().st_size == 102


def test_lab_gc_ends_what_a_death_left_half_done(cache: HfCache) -> None:
    doomed = cache.snapshot(MODEL, f".mlxd-pruned-{OLDER}")
    os.rename(cache.snapshot(MODEL, OLDER), doomed)
    found = planned(cache)
    assert found.prune_snapshots == [OLDER, OLD]
    assert found.reclaim_bytes == 201
    assert execute(cache.root, nothing, rename).reclaimed_bytes == 201
    assert not doomed.exists()
