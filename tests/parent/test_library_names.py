"""Names: ids, aliases, profiles and endings; what is unclear or unknown is told; the library in time."""

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.config import Settings
from parent.library.catalog import ModelEntry, read_entry
from parent.library.library import Library
from parent.library.names import Names
from parent.model_options import ModelOptions, Profile
from shared.errors import ErrorCode, Refused
from tests.parent.models import write_model


def entry(model_id: str, *aliases: str) -> ModelEntry:
    return ModelEntry(id=model_id, path=Path("/m") / model_id, aliases=list(aliases))


ENTRIES = [
    entry("org/Alpha-1B", "starter"),
    entry("other/Beta"),
    entry("org/Beta", "b"),
    entry("hf:org/Alpha-1B"),
    entry("deep/er/Gamma"),
    entry("org/Delta"),
    entry("org/Delta@v2"),
    entry("ORG/delta-x"),
]
SAID = {
    "org/Alpha-1B": ModelOptions(
        aliases=["small"], profiles={"wild": Profile(temperature=1.5), "calm": Profile(temperature=0.1)}
    ),
    "b": ModelOptions(aliases=["bee"]),  # by the name of a card
    "nobody/here": ModelOptions(aliases=["ghost"]),
}
NAMES = Names(ENTRIES, SAID)


@pytest.mark.parametrize(
    ("name", "model_id", "profile"),
    [
        ("org/Alpha-1B", "org/Alpha-1B", ""),
        ("starter", "org/Alpha-1B", ""),
        ("small", "org/Alpha-1B", ""),
        ("Alpha-1B", "org/Alpha-1B", ""),
        ("alpha-1b", "org/Alpha-1B", ""),
        ("SMALL", "org/Alpha-1B", ""),
        ("hf:org/Alpha-1B", "hf:org/Alpha-1B", ""),
        ("HF:org/alpha-1b", "hf:org/Alpha-1B", ""),
        ("ORG/beta", "org/Beta", ""),
        ("b", "org/Beta", ""),
        ("bee", "org/Beta", ""),
        ("gamma", "deep/er/Gamma", ""),
        ("er/gamma", "deep/er/Gamma", ""),
        ("Delta", "org/Delta", ""),
        ("delta@v2", "org/Delta@v2", ""),
        ("org/Alpha-1B:wild", "org/Alpha-1B", "wild"),
        ("small:calm", "org/Alpha-1B", "calm"),
        ("starter:calm", "org/Alpha-1B", "calm"),
        ("alpha-1b:calm", "org/Alpha-1B", "calm"),
    ],
)
def test_a_name_means_a_model_and_perhaps_a_profile(name: str, model_id: str, profile: str) -> None:
    found = NAMES.resolve(name)
    assert (found.entry.id, found.profile_name) == (model_id, profile)
    assert found.profile == (SAID["org/Alpha-1B"].profiles[profile] if profile else None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Beta", "may mean other/Beta, org/Beta; write the whole name"),
        ("beta:wild", "may mean other/Beta, org/Beta"),
        ("Alpha-2B", "did you mean org/Alpha-1B"),
        ("zzzzzz", "there is org/Alpha-1B, other/Beta, org/Beta"),
        ("small:loud", "org/Alpha-1B has no profile 'loud'; it has wild, calm"),
        ("other/Beta:loud", "other/Beta has no profile 'loud'; it has none"),
        ("small:", "has no profile ''"),
        ("ghost", "there is no model 'ghost'"),
        ("lpha-1B", "there is no model"),
        (":calm", "there is no model"),
        ("/", "there is no model"),
        ("", "is empty"),
        (" ", "is empty"),
        ("x" * 5000, "there is no model"),
        ("a\0b", "there is no model"),
        ("/m/org/Beta", "there is no model"),
    ],
)
def test_an_unknown_or_unclear_name_is_refused_with_what_there_is(name: str, told: str) -> None:
    with pytest.raises(Refused) as caught:
        NAMES.resolve(name)
    failure = caught.value.failure
    assert (failure.code, failure.param) == (ErrorCode.MODEL_NOT_FOUND, "model")
    assert told in failure.message


def test_an_empty_library_says_what_to_do() -> None:
    with pytest.raises(Refused, match="mlxd pull starter"):
        Names([], {}).resolve("x")


WORDS = st.text("aAbB:/@.", min_size=1, max_size=5).filter(str.strip)
PLAIN = st.text("aAbB/.", min_size=1, max_size=4)


@given(
    st.dictionaries(
        WORDS,
        st.tuples(st.lists(PLAIN, max_size=2), st.lists(WORDS, max_size=2), st.lists(PLAIN, max_size=2)),
        min_size=1,
        max_size=6,
    )
)
def test_every_id_alias_and_profile_means_itself_whatever_the_others_are_called(
    models: dict[str, tuple[list[str], list[str], list[str]]],
) -> None:
    owners: dict[str, str] = {model_id: model_id for model_id in models}
    said, entries = {}, []
    for model_id, (given_names, carried, profiles) in models.items():
        aliases = [name for name in given_names if owners.setdefault(name, model_id) == model_id]
        said[model_id] = ModelOptions(
            aliases=aliases, profiles={name: Profile(top_k=number) for number, name in enumerate(profiles)}
        )
        entries.append(entry(model_id, *carried))
    names = Names(entries, said)
    for (
        one
    ) in entries:  # names of cards are given by strangers: they yield to all others, and to earlier ones
        for name in one.aliases:
            owners.setdefault(name, one.id)
    for name, owner in owners.items():
        found = names.resolve(name)
        assert (found.entry.id, found.profile) == (owner, None)
        for profile, options in said[owner].profiles.items():
            if f"{name}:{profile}" not in owners:
                found = names.resolve(f"{name}:{profile}")
                assert (found.entry.id, found.profile_name, found.profile) == (owner, profile, options)


# ---------------------------------------------------------------- the library


def library(data: Path, said: dict[str, ModelOptions] | None = None, model: str = "") -> Library:
    settings = Settings(data_dir=data, hf_cache="none", model=model)
    return Library(lambda: settings, lambda: said if said is not None else {})


def test_names_follow_the_settings_file_without_a_scan(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny", card={"aliases": ["t"]})
    said = {"now": {"tiny": ModelOptions(aliases=["one"])}}
    made = Library(lambda: Settings(data_dir=tmp_path, hf_cache="none"), lambda: said["now"])
    made.scan()
    assert made.resolve("one").entry.id == "tiny"
    assert made.names(made.entries[0]) == ["tiny", "one", "t"]
    said["now"] = {"t": ModelOptions(aliases=["two"], pin=True)}
    assert made.resolve("two").entry.id == "tiny"
    assert made.options("tiny").pin
    assert made.options("nobody") == ModelOptions()
    with pytest.raises(Refused):
        made.resolve("one")


def test_a_broken_model_has_its_name_all_the_same(tmp_path: Path) -> None:
    (write_model(tmp_path / "models" / "bad") / "tokenizer.json").unlink()
    made = library(tmp_path)
    made.scan()
    assert "no tokenizer.json" in made.resolve("bad").entry.error


def test_without_a_name_the_setting_then_the_starter_then_the_first_is_meant(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_model(tmp_path / "models" / name, card={"aliases": ["starter"] if name == "c" else []})
    for model, meant in (("b", "b"), ("", "c")):
        made = library(tmp_path, model=model)
        made.scan()
        assert made.default().id == meant
    elsewhere = write_model(tmp_path / "elsewhere", hidden_size=32)
    made = library(tmp_path, model=str(elsewhere))
    made.scan()
    with pytest.raises(Refused):
        made.default()
    made.add(read_entry(elsewhere, "elsewhere"))
    assert made.default().path == elsewhere


def test_a_folder_from_anywhere_is_added_once_and_seen_by_later_scans(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "mine")
    elsewhere = write_model(tmp_path / "elsewhere" / "mine", hidden_size=32)
    other = write_model(tmp_path / "elsewhere" / "other")
    made = library(tmp_path)
    made.scan()
    assert made.add(read_entry(other, "other")).id == "other"
    assert made.add(read_entry(other, "other")).id == "other"
    added = made.add(read_entry(elsewhere, "mine"))
    assert (added.id, added.root) == ("path:mine", "path")
    assert made.add(read_entry(tmp_path / "models" / "mine", "x")).id == "mine"
    assert [each.id for each in made.entries] == ["mine", "other", "path:mine"]
    assert not made.scan()
    assert made.resolve("mine").entry.path == tmp_path / "models" / "mine"
    write_model(other, hidden_size=16)
    assert made.scan()
    assert made.resolve("other").entry.config["hidden_size"] == 16
    for file in other.iterdir():
        file.unlink()
    other.rmdir()
    assert made.scan()
    assert [each.id for each in made.entries] == ["mine", "path:mine"]


def test_an_added_model_keeps_its_id_and_facts_whatever_comes_later(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "elsewhere" / "mine", hidden_size=32)
    made = library(tmp_path)
    added = made.add(ModelEntry(id="mine", path=folder, bytes=7))
    write_model(tmp_path / "models" / "mine")
    (tmp_path / "models" / "linked").symlink_to(folder)
    assert made.scan()
    assert made.resolve("mine").entry == added
    assert {each.id: each.root for each in made.entries} == {"mine": "path", "own:mine": "own"}
    write_model(folder, hidden_size=16)
    assert made.scan()
    assert made.resolve("mine").entry.config["hidden_size"] == 16


def test_refreshes_that_come_together_share_one_scan_and_block_nobody(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    looking, go_on = threading.Event(), threading.Event()
    asked: list[int] = []

    def settings() -> Settings:
        asked.append(threading.get_ident())
        looking.set()
        assert go_on.wait(60)
        return Settings(data_dir=tmp_path, hf_cache="none")

    made = Library(settings, dict)

    async def main() -> list[bool | BaseException]:
        first = asyncio.ensure_future(made.refresh())
        await asyncio.to_thread(looking.wait, 60)
        others = [asyncio.ensure_future(made.refresh()) for _ in range(5)]
        leaving = asyncio.ensure_future(made.refresh())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert made.entries == []
        go_on.set()
        return await asyncio.gather(first, *others, leaving, return_exceptions=True)

    *answers, left = asyncio.run(main())
    assert answers == [True] * 6
    assert isinstance(left, asyncio.CancelledError)
    assert len(asked) == 1
    assert asked[0] != threading.get_ident()
    assert [each.id for each in made.entries] == ["tiny"]
    assert asyncio.run(made.refresh()) is False
    assert len(asked) == 2
