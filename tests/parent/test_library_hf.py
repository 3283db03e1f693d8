"""The Hugging Face cache in place: revisions, their names, and that a download is never seen half-done."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.hf_cache import PULLING, cache_dir
from parent.library.library import Library
from parent.model_options import ModelOptions, Profile
from shared.checkpoint import INDEX
from shared.errors import Refused
from tests.parent.hf_caches import HfCache
from tests.parent.models import write_model
from tests.shared.test_files import let_go

MODEL = "org/tiny"
ONE, TWO, THREE = "1" * 40, "2" * 40, "3" * 40


@pytest.fixture
def cache(tmp_path: Path) -> HfCache:
    return HfCache(tmp_path / "hub")


def listed(cache: HfCache, **settings: object) -> list[ModelEntry]:
    made = Settings(data_dir=cache.root.parent / "data", hf_cache=str(cache.root), **settings)  # type: ignore[arg-type]
    library = Library(lambda: made, dict)
    library.scan()
    return library.entries


def ids(cache: HfCache) -> list[str]:
    return [entry.id for entry in listed(cache)]


# ---------------------------------------------------------------- where it is


@pytest.mark.parametrize(
    ("setting", "environ", "place"),
    [
        ("auto", {}, "/h/.cache/huggingface/hub"),
        ("auto", {"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ("auto", {"HF_HOME": "/f", "XDG_CACHE_HOME": "/x"}, "/f/hub"),
        ("auto", {"HF_HOME": "~/f"}, "/h/f/hub"),
        ("auto", {"HF_HOME": "/f", "HF_HUB_CACHE": "/c"}, "/c"),
        ("auto", {"HF_HOME": "", "HF_HUB_CACHE": ""}, "/h/.cache/huggingface/hub"),
        ("/own", {"HF_HUB_CACHE": "/c"}, "/own"),
        ("~/own", {}, "/h/own"),
    ],
)
def test_the_cache_is_where_the_hubs_own_programs_look(
    setting: str, environ: dict[str, str], place: str
) -> None:
    assert cache_dir(setting, environ, Path("/h")) == Path(place)


def test_it_can_be_left_out(cache: HfCache) -> None:
    assert cache_dir("none", {"HF_HOME": "/f"}, Path("/h")) is None
    cache.commit(MODEL, ONE, ref="main")
    settings = Settings(data_dir=cache.root.parent / "data", hf_cache="none")
    library = Library(lambda: settings, dict, environ={"HF_HUB_CACHE": str(cache.root)})
    assert not library.scan()
    assert library.entries == []


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.write_text("a file"), lambda path: path.mkdir()]
)
def test_without_a_cache_folder_there_are_just_no_models(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "hub")
    assert ids(HfCache(tmp_path / "hub")) == []


def test_the_caches_of_these_tests_are_laid_out_as_the_hub_does(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    cache.commit(MODEL, TWO, ref="refs/pr/1", hidden_size=32)
    (repo,) = scan_cache_dir(cache.root).repos
    assert (repo.repo_id, repo.repo_type) == (MODEL, "model")
    assert {(one.commit_hash, tuple(one.refs)) for one in repo.revisions} == {
        (ONE, ("main",)),
        (TWO, ("refs/pr/1",)),
    }


# ---------------------------------------------------------------- revisions


def test_a_model_is_listed_by_its_repository_with_its_commit(cache: HfCache) -> None:
    snapshot = cache.commit(MODEL, ONE, ref="main")
    (entry,) = listed(cache)
    assert (entry.id, entry.root, entry.revision, entry.path) == (MODEL, "hf", ONE, snapshot)
    assert (entry.family, entry.bytes, entry.error) == ("llama", 12800, "")


def test_a_repository_without_an_organisation_has_its_bare_name(cache: HfCache) -> None:
    cache.commit("gpt", ONE, ref="main")
    assert ids(cache) == ["gpt"]


def test_other_folders_of_the_cache_are_no_models(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    for name in ("datasets--org--x", "spaces--org--x", ".locks", "models--", "models--org--"):
        shutil.copytree(cache.repo(MODEL), cache.root / name, symlinks=True)
    (cache.root / "version.txt").write_text("1")
    assert ids(cache) == [MODEL]


def test_the_name_means_what_main_points_to_and_others_are_named_by_ref_or_commit(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main", at=1)
    cache.commit(MODEL, TWO, ref="v2", at=2, hidden_size=32)
    cache.commit(MODEL, THREE, at=3, hidden_size=16)
    assert {entry.id: entry.revision for entry in listed(cache)} == {
        MODEL: ONE,
        f"{MODEL}@v2": TWO,
        f"{MODEL}@33333333": THREE,
    }


def test_a_ref_with_slashes_is_a_name_too(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    cache.commit(MODEL, TWO, ref="refs/pr/3")
    assert ids(cache) == [MODEL, f"{MODEL}@refs/pr/3"]


@pytest.mark.parametrize("main", [TWO, "f" * 40])
def test_while_main_is_not_whole_the_newest_whole_one_without_a_ref_is_meant(
    cache: HfCache, main: str
) -> None:
    cache.commit(MODEL, ONE, at=5)
    cache.commit(MODEL, TWO, at=9, hidden_size=32)
    cache.commit(MODEL, THREE, at=3, hidden_size=16)
    (cache.snapshot(MODEL, TWO) / "model.safetensors").unlink()
    cache.ref(MODEL, "main", main)
    assert {entry.id: entry.revision for entry in listed(cache)} == {MODEL: ONE, f"{MODEL}@33333333": THREE}
    cache.ref(MODEL, "v1", ONE)
    assert {entry.id: entry.revision for entry in listed(cache)} == {f"{MODEL}@v1": ONE, MODEL: THREE}


def test_a_revision_keeps_its_id_when_others_come(cache: HfCache) -> None:
    cache.commit(MODEL, TWO, ref="v2", at=1, hidden_size=32)
    assert ids(cache) == [f"{MODEL}@v2"]
    cache.commit(MODEL, THREE, at=2, hidden_size=16)
    assert ids(cache) == [f"{MODEL}@33333333", f"{MODEL}@v2"]
    cache.ref(MODEL, "a-later-name", TWO)
    os.utime(cache.repo(MODEL) / "refs" / "v2", (1, 1))
    assert ids(cache) == [f"{MODEL}@33333333", f"{MODEL}@v2"]
    cache.commit(MODEL, ONE, ref="main", at=3)
    assert {entry.id: entry.revision for entry in listed(cache)} == {
        MODEL: ONE,
        f"{MODEL}@v2": TWO,
        f"{MODEL}@33333333": THREE,
    }
    cache.ref(MODEL, "main", TWO)
    assert {entry.id: entry.revision for entry in listed(cache)} == {
        MODEL: TWO,
        f"{MODEL}@11111111": ONE,
        f"{MODEL}@33333333": THREE,
    }


def test_every_name_of_a_revision_that_is_there_leads_to_it(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main", at=1)
    cache.ref(MODEL, "v1", ONE)
    cache.commit(MODEL, TWO, ref="Dev", at=2, hidden_size=32)
    cache.ref(MODEL, "refs/pr/3", TWO)
    cache.commit(MODEL, THREE, at=3, hidden_size=16)
    cache.commit("solo/only", ONE, ref="v1", hidden_size=8)
    settings = Settings(data_dir=cache.root.parent / "data", hf_cache=str(cache.root))
    options = {f"{MODEL}@v1": ModelOptions(profiles={"calm": Profile(top_k=1)})}
    library = Library(lambda: settings, lambda: options)
    library.scan()
    for name, commit in {
        MODEL: ONE,
        "tiny": ONE,
        f"{MODEL}@main": ONE,
        f"{MODEL}@v1": ONE,
        f"{MODEL}@{ONE}": ONE,
        f"{MODEL}@{ONE[:8]}": ONE,
        "TINY@MAIN": ONE,
        f"{MODEL}@v1:calm": ONE,
        f"{MODEL}:calm": ONE,
        f"{MODEL}@Dev": TWO,
        f"{MODEL}@dev": TWO,
        f"{MODEL}@refs/pr/3": TWO,
        "tiny@refs/pr/3": TWO,
        f"{MODEL}@{TWO[:12]}": TWO,
        f"{MODEL}@{THREE[:9]}": THREE,
    }.items():
        assert library.resolve(name).entry.revision == commit, name
    for name in ("solo/only", "only", "solo/only@v1", "only@v1", f"only@{ONE[:10]}"):
        assert library.resolve(name).entry.id == "solo/only@v1", name
    for name in (f"{MODEL}@v9", f"{MODEL}@", f"{MODEL}@{ONE[:7]}", f"{MODEL}@{ONE}1", "only@main", "@main"):
        with pytest.raises(Refused, match="there is no model"):
            library.resolve(name)


def test_a_name_that_fits_several_revisions_is_unclear(cache: HfCache) -> None:
    one, other = "a" * 8 + "b" * 32, "a" * 8 + "c" * 32
    cache.commit(MODEL, one, hidden_size=16)
    cache.commit(MODEL, other, hidden_size=32)
    settings = Settings(data_dir=cache.root.parent / "data", hf_cache=str(cache.root))
    library = Library(lambda: settings, dict)
    library.scan()
    for name in (MODEL, "tiny", f"{MODEL}@{'a' * 8}b"):
        if name.endswith("b"):
            assert library.resolve(name).entry.revision == one
        else:
            with pytest.raises(Refused, match="may mean"):
                library.resolve(name)


def test_a_copy_that_is_left_out_lends_its_names_to_the_one_that_is_listed(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    write_model(cache.root.parent / "data" / "models" / "org" / "tiny")
    cache.commit("org/other", TWO, ref="main")
    write_model(cache.root.parent / "data" / "models" / "org" / "other", hidden_size=32)
    settings = Settings(data_dir=cache.root.parent / "data", hf_cache=str(cache.root))
    library = Library(lambda: settings, dict)
    library.scan()
    assert library.resolve(f"{MODEL}@main").entry.root == "own"
    assert library.resolve("org/other").entry.root == "own"
    assert library.resolve("org/other@main").entry.id == "hf:org/other"


def test_commits_with_equal_beginnings_keep_names_of_their_own(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    cache.commit(MODEL, "a" * 8 + "b" * 32)
    cache.commit(MODEL, "a" * 8 + "c" * 32)
    assert len(set(ids(cache))) == 3


# ---------------------------------------------------------------- never half-done


def remove(name: str) -> Callable[[HfCache], object]:
    return lambda cache: (cache.snapshot(MODEL, ONE) / name).unlink()


def dangle(name: str) -> Callable[[HfCache], object]:
    def spoil(cache: HfCache) -> None:
        blob = (cache.snapshot(MODEL, ONE) / name).resolve()
        blob.rename(blob.with_name(blob.name + ".incomplete"))

    return spoil


def index(*files: str) -> Callable[[HfCache], object]:
    def spoil(cache: HfCache) -> None:
        weights = cache.snapshot(MODEL, ONE) / "model.safetensors"
        shard = weights.with_name("model-00001-of-00002.safetensors")
        weights.rename(shard)
        names = {f"t{number}": file for number, file in enumerate(files)}
        text = '{"weight_map": {' + ", ".join(f'"{key}": "{file}"' for key, file in names.items()) + "}}"
        cache.file(MODEL, ONE, INDEX, text.encode())

    return spoil


def one_shard(cache: HfCache) -> None:
    weights = cache.snapshot(MODEL, ONE) / "model.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))


def odd_shard(cache: HfCache) -> None:
    weights = cache.snapshot(MODEL, ONE) / "model.safetensors"
    weights.rename(weights.with_name("model-part-a.safetensors"))
    cache.incomplete(MODEL)


def pulled(cache: HfCache) -> None:
    (cache.repo(MODEL) / PULLING).write_text(ONE)


@pytest.mark.parametrize(
    "spoil",
    [
        remove("config.json"),
        remove("tokenizer.json"),
        remove("model.safetensors"),
        dangle("config.json"),
        dangle("tokenizer.json"),
        dangle("model.safetensors"),
        dangle("generation_config.json"),
        index("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        one_shard,
        odd_shard,
        pulled,
        lambda cache: shutil.rmtree(cache.repo(MODEL) / "blobs"),
        lambda cache: shutil.rmtree(cache.snapshot(MODEL, ONE)),
    ],
    ids=[
        "no config",
        "no tokenizer",
        "no weights",
        "config dangles",
        "tokenizer dangles",
        "weights dangle",
        "a small file dangles",
        "a shard of the index is missing",
        "no index and one of two",
        "no index, no numbers, and a download runs",
        "a pull of ours runs",
        "no blobs",
        "only refs",
    ],
)
def test_an_unfinished_download_is_never_seen(cache: HfCache, spoil: Callable[[HfCache], object]) -> None:
    cache.commit(MODEL, ONE, ref="main")
    cache.file(MODEL, ONE, "generation_config.json", b"{}")
    assert ids(cache) == [MODEL]
    spoil(cache)
    assert ids(cache) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_a_fault_and_not_waited_for(cache: HfCache, name: str) -> None:
    cache.commit(MODEL, ONE, ref="main")
    file = cache.snapshot(MODEL, ONE) / name
    file.unlink()
    os.mkfifo(file)
    with let_go(file):
        (entry,) = listed(cache)
    assert "a named pipe, not a file" in entry.error


def test_a_ref_that_is_a_pipe_is_none(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    pipe = cache.repo(MODEL) / "refs" / "v1"
    os.mkfifo(pipe)
    with let_go(pipe):
        assert ids(cache) == [MODEL]


def test_a_new_revision_under_way_leaves_the_old_one_served(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, at=1)
    cache.ref(MODEL, "main", TWO)
    cache.incomplete(MODEL)
    cache.file(MODEL, TWO, "config.json", (cache.snapshot(MODEL, ONE) / "config.json").read_bytes())
    (entry,) = listed(cache)
    assert (entry.id, entry.revision) == (MODEL, ONE)


def test_a_download_of_something_else_does_not_hide_a_whole_model(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    cache.incomplete(MODEL)
    assert ids(cache) == [MODEL]


def test_a_whole_but_broken_snapshot_is_listed_with_its_error(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    blob = (cache.snapshot(MODEL, ONE) / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:100])
    (entry,) = listed(cache)
    assert "model.safetensors" in entry.error
    assert entry.id == MODEL


def test_whole_shards_are_a_model_with_and_without_their_index(cache: HfCache) -> None:
    cache.commit(MODEL, ONE, ref="main")
    index("model-00001-of-00002.safetensors")(cache)
    assert ids(cache) == [MODEL]
    remove(INDEX)(cache)
    assert ids(cache) == []
    second = cache.snapshot(MODEL, ONE) / "model-00002-of-00002.safetensors"
    second.symlink_to(second.with_name("model-00001-of-00002.safetensors").readlink())
    assert ids(cache) == [MODEL]
