"""Several roots: who has an id, copies and links are listed once, and folders that cannot be read."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from shared.checkpoint import INDEX
from tests.parent.hf_caches import HfCache
from tests.parent.models import write_model
from tests.shared.test_files import IN_THE_PLACE, let_go

COMMIT = "1" * 40


def listed(folder: Path, *extra: Path) -> dict[str, ModelEntry]:
    settings = Settings(
        data_dir=folder / "data", model_dirs=[str(each) for each in extra], hf_cache=str(folder / "hub")
    )
    library = Library(lambda: settings, dict)
    library.scan()
    assert len({entry.id for entry in library.entries}) == len(library.entries)
    return {entry.id: entry for entry in library.entries}


def own(folder: Path) -> Path:
    return folder / "data" / "models"


def test_every_root_is_listed_and_says_which_it_is(tmp_path: Path) -> None:
    write_model(own(tmp_path) / "org" / "a")
    write_model(tmp_path / "more" / "b")
    write_model(tmp_path / "more" / "org" / "c")
    HfCache(tmp_path / "hub").commit("org/d", COMMIT, ref="main")
    found = listed(tmp_path, tmp_path / "more", tmp_path / "nowhere")
    assert {name: entry.root for name, entry in found.items()} == {
        "org/a": "own",
        "b": "extra",
        "org/c": "extra",
        "org/d": "hf",
    }


def test_an_id_belongs_to_the_own_folder_then_the_further_ones_then_the_cache(tmp_path: Path) -> None:
    write_model(own(tmp_path) / "org" / "m", hidden_size=64)
    write_model(tmp_path / "one" / "org" / "m", hidden_size=32)
    write_model(tmp_path / "two" / "org" / "m", hidden_size=16)
    HfCache(tmp_path / "hub").commit("org/m", COMMIT, ref="main", hidden_size=8)
    found = listed(tmp_path, tmp_path / "one", tmp_path / "two")
    assert {name: (entry.root, entry.config["hidden_size"]) for name, entry in found.items()} == {
        "org/m": ("own", 64),
        "extra:org/m": ("extra", 32),
        "extra2:org/m": ("extra", 16),
        "hf:org/m": ("hf", 8),
    }


def test_a_copy_of_the_same_id_is_listed_once(tmp_path: Path) -> None:
    HfCache(tmp_path / "hub").commit("org/m", COMMIT, ref="main")
    write_model(own(tmp_path) / "org" / "m", card={"name": "mine"})
    assert {name: entry.root for name, entry in listed(tmp_path).items()} == {"org/m": "own"}


def test_weights_that_differ_only_inside_are_no_copy(tmp_path: Path) -> None:
    HfCache(tmp_path / "hub").commit("org/m", COMMIT, ref="main")
    weights = write_model(own(tmp_path) / "org" / "m") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] = 1
    weights.write_bytes(content)
    assert list(listed(tmp_path)) == ["hf:org/m", "org/m"]


def test_a_folder_that_is_reached_twice_is_listed_once(tmp_path: Path) -> None:
    folder = write_model(own(tmp_path) / "m")
    (own(tmp_path) / "n").symlink_to(folder)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "linked").symlink_to(folder)
    snapshot = HfCache(tmp_path / "hub").commit("org/h", COMMIT, ref="main", hidden_size=8)
    (own(tmp_path) / "handy").symlink_to(snapshot)
    found = listed(tmp_path, tmp_path / "more", own(tmp_path))
    assert {name: entry.root for name, entry in found.items()} == {"m": "own", "handy": "own"}


def test_of_a_folder_and_a_link_to_it_the_folder_is_the_model(tmp_path: Path) -> None:
    folder = write_model(own(tmp_path) / "m")
    (own(tmp_path) / "a").symlink_to(folder)
    assert list(listed(tmp_path)) == ["m"]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"two\nlines", b"\x1b[31mred"])
def test_a_folder_whose_name_nobody_could_write_is_no_model(tmp_path: Path, name: bytes) -> None:
    write_model(own(tmp_path) / "good")
    shutil.copytree(own(tmp_path) / "good", own(tmp_path) / os.fsdecode(name))
    shutil.copytree(own(tmp_path) / "good", own(tmp_path) / "org" / os.fsdecode(name))
    HfCache(tmp_path / "hub").commit(f"org/{os.fsdecode(name)}", COMMIT, ref="main")
    assert list(listed(tmp_path)) == ["good"]


def test_a_library_below_a_path_that_is_not_utf_8_works(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    write_model(odd / "data" / "models" / "m")
    assert list(listed(odd)) == ["m"]
    assert list(listed(odd)) == ["m"]


@pytest.mark.parametrize("kind", IN_THE_PLACE)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "mlxd.json", "tokenizer.json", "generation_config.json", INDEX],
)
def test_what_stands_in_the_place_of_a_file_is_told_and_hides_nothing_else(
    tmp_path: Path, name: str, kind: str
) -> None:
    make, said = IN_THE_PLACE[kind]
    write_model(own(tmp_path) / "good")
    for folder in (own(tmp_path) / "bad", tmp_path / "more" / "bad"):  # the second is compared with the first
        (write_model(folder) / name).unlink(missing_ok=True)
        make(folder / name)
    with let_go(own(tmp_path) / "bad" / name):
        found = listed(tmp_path, tmp_path / "more")
    assert (found["good"].error, said in found["bad"].error, "\n" in found["bad"].error) == ("", True, False)
    assert str(own(tmp_path) / "bad" / name) in found["bad"].error


def test_a_link_that_leads_nowhere_or_to_itself_is_no_model(tmp_path: Path) -> None:
    own(tmp_path).mkdir(parents=True)
    (own(tmp_path) / "gone").symlink_to(tmp_path / "nowhere")
    (own(tmp_path) / "loop").symlink_to(own(tmp_path) / "loop")
    (own(tmp_path) / "up").symlink_to(own(tmp_path))
    assert listed(tmp_path) == {}


@pytest.fixture
def not_root() -> Iterator[Path]:
    """A folder of its own for somebody who may not read everything, which the test then is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    us = os.geteuid()
    if us == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if us == 0:
            os.seteuid(0)
        for place, _, _ in os.walk(folder):  # from the top, so that each folder can be gone into
            os.chmod(place, 0o777)
        shutil.rmtree(folder)


def test_what_may_not_be_read_is_told_and_hides_nothing_else(not_root: Path) -> None:
    write_model(own(not_root) / "good")
    write_model(own(not_root) / "shut").chmod(0)
    (write_model(own(not_root) / "weights") / "model.safetensors").chmod(0)
    cache = HfCache(not_root / "hub")
    cache.commit("org/good", COMMIT, ref="main", hidden_size=8)
    cache.commit("org/shut", COMMIT, ref="main")
    cache.snapshot("org/shut", COMMIT).chmod(0)
    (not_root / "more").mkdir()
    (not_root / "more").chmod(0)
    found = listed(not_root, not_root / "more")
    assert sorted(found) == ["good", "org/good", "shut", "weights"]
    assert (found["good"].error, found["org/good"].error) == ("", "")
    assert "Permission denied" in found["shut"].error
    assert "model.safetensors: cannot be read (Permission denied)" in found["weights"].error
    (own(not_root) / "weights" / "model.safetensors").chmod(0o644)
    (own(not_root) / "shut").chmod(0o755)
    assert [entry.error for entry in listed(not_root).values()] == ["", "", "", ""]
    (not_root / "data" / "models").chmod(0)
    (not_root / "hub").chmod(0)
    assert listed(not_root) == {}
