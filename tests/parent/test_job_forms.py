"""From what a request says to the spec of a job: names to places, faults by field, outputs that are free."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.config import Settings
from parent.jobs import forms, kinds
from parent.jobs.forms import Order, order_of
from parent.jobs.names import Names
from parent.library.library import Library
from parent.library.machine import cpu
from shared.errors import ErrorCode, Refused
from shared.jobs import JobSpec
from shared.lab import Dataset, Finetune, Quantize
from tests.parent.models import write_model

DEVICE = cpu(64 << 30)


@dataclasses.dataclass
class Place:
    """A data folder with a model, a data set, and a data set elsewhere."""

    data: Path
    elsewhere: Path
    more: tuple[Path, ...] = ()

    def names(self, *, trusts_paths: bool = False) -> Names:
        settings = Settings(
            data_dir=self.data, hf_cache="none", dataset_dirs=[str(folder) for folder in self.more]
        )
        library = Library(lambda: settings, dict)
        library.scan()
        return Names(library, settings, trusts_paths=trusts_paths)

    def order(self, kind: str, *, trusts_paths: bool = False, **body: Any) -> Order:
        return order_of(kind, body, self.names(trusts_paths=trusts_paths), DEVICE)

    def refused(self, kind: str, **body: Any) -> Refused:
        with pytest.raises(Refused) as refused:
            self.order(kind, **body)
        return refused.value


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    data = tmp_path / "data"
    write_model(data / "models" / "org" / "tiny")
    for folder in (data / "datasets" / "mine", tmp_path / "elsewhere" / "other"):
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text('{"text": "x"}\n')
    known: dict[type[JobSpec], kinds.Kind] = {Quantize: kinds.Kind(), Dataset: kinds.Kind()}
    monkeypatch.setattr(kinds, "KINDS", kinds.KINDS | known)
    return Place(data, tmp_path / "elsewhere")


def test_names_become_places_and_the_output_gets_a_name_that_is_free(place: Place) -> None:
    order = place.order("finetune", model="tiny", data="mine", rank=4)
    assert isinstance(order.spec, Finetune)
    assert order.spec.model == str(place.data / "models" / "org" / "tiny")
    assert (order.spec.model_id, order.spec.rank) == ("org/tiny", 4)
    assert order.spec.data == str(place.data / "datasets" / "mine")
    assert order.output == str(place.data / "adapters" / "tiny-sft")
    assert order.needs > 100 * 64 * 4
    Path(order.output).mkdir(parents=True)
    assert place.order("finetune", model="tiny", data="mine").output.endswith("/tiny-sft-2")
    assert msgspec.json.decode(msgspec.json.encode(order.spec), type=Finetune) == order.spec


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({}, "tiny-4bit"),
        ({"bits": 8}, "tiny-8bit"),
        ({"mode": "mxfp4", "group_size": 32}, "tiny-mxfp4"),
        ({"target_bpw": 4.5}, "tiny-mixed-4.5bpw"),
        ({"target_bpw": 5, "rotate": True}, "tiny-mixed-5bpw-rot42"),
        ({"name": "my/own"}, "my/own"),
        ({"calibration": "mine"}, "tiny-4bit"),
    ],
)
def test_a_quantized_model_is_called_by_its_recipe(place: Place, body: dict[str, Any], name: str) -> None:
    order = place.order("quantize", model="org/tiny", **body)
    assert order.output == str(place.data / "models" / name)
    if "calibration" in body:
        assert getattr(order.spec, "calibration", "") == str(place.data / "datasets" / "mine" / "train.jsonl")


def test_other_words_for_fields_are_taken(place: Place) -> None:
    first = place.order("quantize", model_id="tiny", rotate_weights=True, n_calibration=2)
    assert first.spec == place.order("quantize", model="tiny", rotate=True, num_calibration=2).spec
    folder = str(place.data / "models" / "org" / "tiny")
    by_path = place.order("finetune", model_dir=folder, data_dir=str(place.data / "datasets" / "mine"))
    assert by_path.spec == place.order("finetune", model="tiny", data="mine").spec
    dora = place.order("finetune", model="tiny", data="mine", adapter_kind="dora")
    assert getattr(dora.spec, "kind", "") == "dora"


def test_every_field_that_is_wrong_is_named(place: Place) -> None:
    refused = place.refused("finetune", rank=0, itres=5, lora_dropout="much", model=7)
    said = refused.failure.message
    assert (refused.failure.code, refused.failure.param) == (ErrorCode.INVALID_REQUEST, "rank")
    for part in (
        "rank: expected `int` >= 1",
        "itres: there is no such field; did you mean iters?",
        "lora_dropout: expected `float`, got `str`",
        "model: expected `str`, got `int`",
        "data: is missing",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"model": "nobody", "data": "mine"}, ErrorCode.MODEL_NOT_FOUND, "model: "),
        ({"model": "tiny", "data": "yours"}, ErrorCode.NOT_FOUND, "there is mine"),
        ({"model": "tiny", "data": "../datasets/mine"}, ErrorCode.INVALID_REQUEST, "cannot be the name"),
        ({"model": "tiny", "data": "/etc"}, ErrorCode.FORBIDDEN, "the setting dataset_dirs"),
        ({"model": "tiny", "data": "/etc/../etc/passwd"}, ErrorCode.FORBIDDEN, "not below a folder"),
        ({"model": "/etc", "data": "mine"}, ErrorCode.MODEL_NOT_FOUND, "model: "),
        ({"model": "nobody", "data": "yours"}, ErrorCode.INVALID_REQUEST, "data: there is no data set"),
        (
            {"model": "tiny", "data": "mine", "warm_start_adapter": "none-such"},
            ErrorCode.MODEL_NOT_FOUND,
            "warm_start_adapter: there is no adapter",
        ),
        ({"model": "tiny", "data": "mine", "warm_start_adapter": "/etc"}, ErrorCode.FORBIDDEN, "adapter"),
        ({"model": "tiny", "data": "mine", "name": "a/b"}, ErrorCode.INVALID_REQUEST, "name of an adapter"),
        ({"model": "tiny", "data": "mine", "name": ".hidden"}, ErrorCode.INVALID_REQUEST, "name of an"),
        ({"model": "tiny", "data": "mine", "model_id": "x"}, ErrorCode.INVALID_REQUEST, "no such field"),
    ],
)
def test_what_is_not_there_or_not_ours_is_refused_by_its_field(
    place: Place, body: dict[str, Any], code: ErrorCode, says: str
) -> None:
    refused = place.refused("finetune", **body)
    assert refused.failure.code is code
    assert says in refused.failure.message


def test_an_output_that_exists_is_a_conflict(place: Place) -> None:
    (place.data / "adapters").mkdir()
    os.symlink("/nowhere", place.data / "adapters" / "taken")
    refused = place.refused("finetune", model="tiny", data="mine", name="taken")
    assert refused.failure.code is ErrorCode.CONFLICT


def test_data_elsewhere_is_taken_from_folders_of_the_settings_and_from_the_command_line(place: Place) -> None:
    other = place.elsewhere / "other"
    assert place.refused("finetune", model="tiny", data=str(other)).failure.code is ErrorCode.FORBIDDEN
    order = place.order("finetune", model="tiny", data=str(other), trusts_paths=True)
    assert getattr(order.spec, "data", "") == str(other)
    place.more = (place.elsewhere,)
    for data in ("other", str(other)):
        assert getattr(place.order("finetune", model="tiny", data=data).spec, "data", "") == str(other)
    os.symlink("/etc", place.elsewhere / "link")
    refused = place.refused("finetune", model="tiny", data=str(place.elsewhere / "link"))
    assert refused.failure.code is ErrorCode.FORBIDDEN


def test_a_data_set_is_called_by_its_template(place: Place) -> None:
    order = place.order("dataset", template_id="sft_qa_pairs", inputs={"pairs_text": "Q: a\nA: b"})
    assert order.output == str(place.data / "datasets" / "dataset-sft_qa_pairs")
    assert isinstance(order.spec, Dataset)


def test_a_kind_that_cannot_be_run_is_unsupported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", {Finetune: kinds.Kind()})
    assert place.refused("quantize", model="tiny").failure.code is ErrorCode.UNSUPPORTED
    assert [each["kind"] for each in forms.schemas()] == ["finetune"]


@given(
    st.dictionaries(
        st.text(max_size=12) | st.sampled_from(["model", "data", "rank", "name", "iters"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
        ),
        max_size=6,
    )
)
def test_whatever_comes_is_an_order_or_a_refusal(body: dict[str, Any]) -> None:
    settings = Settings(data_dir=Path("/nonexistent-mlxd"), hf_cache="none")
    names = Names(Library(lambda: settings, dict), settings)
    for kind in ("finetune", "count", "merge_adapters"):
        try:
            order = order_of(kind, body, names, DEVICE)
        except Refused as refused:
            assert "\n" not in refused.failure.message  # noqa: PT017
        else:
            assert order.output.startswith("/nonexistent-mlxd/")


def test_names_that_are_made_up_are_free_and_plain(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, hf_cache="none")
    promised = [str(tmp_path / "A-3")]
    names = Names(Library(lambda: settings, dict), settings, promised=promised)
    (tmp_path / "a").mkdir()
    os.symlink("/nowhere", tmp_path / "a-2")
    assert names.numbered("a", tmp_path) == "a-4"
    assert names.numbered("../é x", tmp_path) == "x"
    assert names.numbered("..", tmp_path) == "job"
