"""The shelf of adapters: what is listed, whose it is, what a name means, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from parent.config import Settings
from parent.library.library import Library
from parent.library.names import Found
from parent.model_options import ModelOptions, Profile
from shared.errors import ErrorCode, Failure, Refused
from tests.adapters import ALL, random_pairs, write_mlx, write_peft
from tests.oracles.checkpoints import write_case


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    for name in ("llama_tied", "qwen3"):
        write_case(name, folder / name)
    return folder


class World:
    """A data folder with two models, `org/llama` and `other`, and whatever adapters a test writes."""

    def __init__(self, folder: Path, cases: Path) -> None:
        self.data, self.llama, self.other = folder / "data", cases / "llama_tied", cases / "qwen3"
        (self.data / "models" / "org").mkdir(parents=True)
        (self.data / "models" / "org" / "llama").symlink_to(self.llama)
        (self.data / "models" / "other").symlink_to(self.other)
        self.options: dict[str, ModelOptions] = {}
        self.more = folder / "more"
        settings = Settings(data_dir=self.data, hf_cache="none", adapter_roots=[str(self.more)])
        self.library = Library(lambda: settings, lambda: self.options)

    def write(self, name: str, model: Path | None = None, seed: int = 0, **config) -> Path:
        pairs = random_pairs(model or self.llama, seed=seed)
        return write_mlx(self.data / "adapters" / name, pairs, **config)

    def ids(self, model: str = "org/llama") -> list[str]:
        self.library.scan()
        return [one.id for one in self.library.adapters_of(self.library.resolve(model).entry)]

    def resolve(self, name: str) -> Found:
        return self.library.resolve(name)

    def refused(self, name: str) -> Failure:
        with pytest.raises(Refused) as refused:
            self.library.resolve(name)
        assert "\n" not in refused.value.failure.message
        return refused.value.failure


@pytest.fixture
def world(tmp_path: Path, cases: Path) -> World:
    return World(tmp_path, cases)


def names(found: Found) -> list[str] | None:
    return None if found.adapters is None else [one.id for one in found.adapters]


def test_an_adapter_is_the_models_that_its_config_names_or_whose_shapes_it_has(world: World) -> None:
    world.write("by-id", base_model="org/llama")
    world.write("by-ending", base_model_name_or_path="llama")
    world.write("by-path", model=world.llama, source_model="", **{"base_model": str(world.llama)})
    world.write("by-shape")
    world.write("far-away", base_model="nobody/has-this")  # not here: shapes decide
    world.write("others", world.other)
    world.write("named-other", base_model="other")
    peft = random_pairs(world.llama, ALL)
    write_peft(world.more / "team" / "peft", peft, alpha=4, base_model_name_or_path="org/llama")
    assert world.ids() == ["by-ending", "by-id", "by-path", "by-shape", "far-away", "team/peft"]
    assert world.ids("other") == ["named-other", "others"]


def test_what_is_no_adapter_is_listed_with_the_reason_or_not_at_all(world: World) -> None:
    world.write("good")
    broken = world.write("broken")
    (broken / "adapter_config.json").write_text("{")
    hidden = world.write(".hidden")
    bad_name = world.write("a+b")
    (world.data / "adapters" / "empty").mkdir()
    best = world.write("run/best")
    world.write("run/checkpoints/step-5")
    world.library.scan()
    assert [one.id for one in world.library.shelf.entries] == [
        "broken",
        "good",
        "run",
        "run/checkpoints/step-5",
    ]
    assert "not JSON" in next(one.error for one in world.library.shelf.entries if one.id == "broken")
    assert hidden.exists()
    assert bad_name.exists()
    assert best.exists()
    assert world.ids() == ["good", "run", "run/checkpoints/step-5"]


def test_a_name_with_an_adapter_means_the_model_with_it(world: World) -> None:
    world.write("a")
    world.write("b", seed=1)
    world.write("deep/inside", seed=2)
    profile = Profile(temperature=0.5, adapter="b")
    world.options["org/llama"] = ModelOptions(aliases=["pet"], profiles={"creative": profile, "a2": profile})
    world.write("a2")  # a profile of the same name wins
    world.library.scan()
    table: list[tuple[str, str, list[str] | None]] = [
        ("org/llama", "", None),
        ("org/llama:a", "", ["a"]),
        ("llama:a", "", ["a"]),
        ("LLAMA:A", "", ["a"]),
        ("pet:a+b", "", ["a", "b"]),
        ("pet:b,a", "", ["b", "a"]),
        ("pet:deep/inside", "", ["deep/inside"]),
        ("pet:inside+a", "", ["deep/inside", "a"]),
        ("pet:none", "", []),
        ("pet:creative", "creative", None),
        ("pet:a2", "a2", None),
    ]
    for name, profile_name, adapters in table:
        found = world.resolve(name)
        assert (found.entry.id, found.profile_name, names(found)) == ("org/llama", profile_name, adapters), (
            name
        )


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("org/llama:poetry", ErrorCode.MODEL_NOT_FOUND, "did you mean poems?"),
        ("org/llama:zzz", ErrorCode.MODEL_NOT_FOUND, "it has d, poems"),
        ("other:poems", ErrorCode.INVALID_REQUEST, "made for org/llama"),
        ("other:zzz", ErrorCode.MODEL_NOT_FOUND, "it has shapes"),
        ("org/llama:shapes", ErrorCode.INVALID_REQUEST, "in the model"),
        ("org/llama:poems+poems", ErrorCode.INVALID_REQUEST, "named twice"),
        ("org/llama:", ErrorCode.MODEL_NOT_FOUND, "no profile ''"),
        ("org/llama:poems+", ErrorCode.INVALID_REQUEST, "no list of adapters"),
        ("org/llama:poems+none", ErrorCode.INVALID_REQUEST, "no list of adapters"),
        ("org/llama:broken", ErrorCode.INVALID_REQUEST, "cannot be used"),
        ("org/llama:d+poems", ErrorCode.INVALID_REQUEST, "DoRA"),
        ("nobody:poems", ErrorCode.MODEL_NOT_FOUND, "no model"),
    ],
)
def test_an_adapter_that_is_not_there_or_not_the_models_is_refused(
    name: str, code: ErrorCode, said: str, world: World
) -> None:
    world.write("poems", base_model="org/llama")
    world.write("shapes", world.other)
    (world.write("broken") / "adapters.safetensors").write_bytes(b"")
    pairs = random_pairs(world.llama)
    magnitudes = {module: b[0] for module, (_, b) in pairs.items()}
    write_mlx(world.data / "adapters" / "d", pairs, magnitudes=magnitudes, base_model="org/llama")
    world.library.scan()
    failure = world.refused(name)
    assert failure.code is code
    assert said in failure.message


def test_an_adapter_that_changes_on_disk_is_another_one_at_once(world: World) -> None:
    folder = world.write("a")
    world.library.scan()
    [first] = world.resolve("llama:a").adapters or ()
    assert [first] == list(world.resolve("llama:a").adapters or ())
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 2.0
    (folder / "adapter_config.json").write_text(json.dumps(config))
    os.utime(folder / "adapter_config.json", ns=(1, 1))
    [second] = world.resolve("llama:a").adapters or ()  # without a scan
    assert first.key != second.key
    assert (first.id, second.id) == ("a", "a")
    assert second.adapter is not None
    assert second.adapter.scale == 2.0


def test_the_path_of_an_adapter_has_to_lie_below_a_root(world: World, tmp_path: Path) -> None:
    inside, outside = world.write("a"), write_mlx(tmp_path / "outside", random_pairs(world.llama))
    (world.data / "adapters" / "link").symlink_to(outside)
    world.library.scan()
    shelf = world.library.shelf
    assert shelf.at(str(inside)).id == "a"
    assert shelf.at(str(world.data / "adapters" / "x" / ".." / "a")).id == "a"
    for path in (str(outside), str(world.data / "adapters" / ".." / ".." / "outside"), "/etc", "relative"):
        with pytest.raises(Refused) as refused:
            shelf.at(path)
        assert refused.value.failure.code is ErrorCode.FORBIDDEN
    with pytest.raises(Refused, match="no adapter"):
        shelf.at(str(world.data / "adapters" / "nothing"))
    world.write("late")
    with pytest.raises(Refused):
        shelf.at(str(world.data / "adapters" / "late"))  # a look comes first
    world.library.scan()
    assert shelf.at(str(world.data / "adapters" / "late")).id == "late"


def test_a_rescan_of_adapters_reads_only_what_has_changed(world: World) -> None:
    world.write("a")
    world.library.scan()
    before = {one.id: one for one in world.library.shelf.entries}
    world.write("b", seed=4)
    world.library.scan()
    after = {one.id: one for one in world.library.shelf.entries}
    assert after["a"] is before["a"]
    assert set(after) == {"a", "b"}
