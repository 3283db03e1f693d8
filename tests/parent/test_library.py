"""The catalog (what is listed, under which names) and the memory arithmetic."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.library.catalog import ModelEntry, default_entry, dtype_note, float_type, resolve, scan
from parent.library.fit import Fit, Shape, explain, loaded_bytes, transient_bytes
from shared.errors import ErrorCode, Refused
from tests.parent.models import write_model


def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_models_of_one_and_two_levels_are_listed_by_id(tmp_path: Path) -> None:
    for name in ("tiny", "org/tiny-b", "org/tiny-a"):
        write_model(models(tmp_path) / name)
    assert [entry.id for entry in scan(tmp_path)] == ["org/tiny-a", "org/tiny-b", "tiny"]


def test_unfinished_and_foreign_folders_are_not_listed(tmp_path: Path) -> None:
    write_model(models(tmp_path) / ".tiny.part")
    write_model(models(tmp_path) / "org" / ".removing-x-1")
    (models(tmp_path) / "notes").mkdir()
    (models(tmp_path) / "readme.txt").write_text("x")
    assert scan(tmp_path) == []


def test_without_a_models_folder_the_library_is_empty(tmp_path: Path) -> None:
    assert scan(tmp_path / "nowhere") == []


def test_facts_come_from_the_checkpoint_and_names_from_the_card(tmp_path: Path) -> None:
    card = {"name": "Tiny", "aliases": ["starter", "t"], "origin": "a test", "later_field": 1}
    write_model(models(tmp_path) / "tiny", card=card)
    (entry,) = scan(tmp_path)
    element = 2 if sys.platform == "darwin" else 4
    assert entry.aliases == ["Tiny", "starter", "t"]
    assert (entry.family, entry.context, entry.dtype, entry.origin) == ("llama", 512, "bfloat16", "a test")
    assert entry.bytes == 100 * 64 * 2
    assert entry.kv_bytes_per_token == 2 * 2 * 2 * 16 * element  # K and V, layers, KV heads, head size
    assert entry.error == ""


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "model.safetensors"),
        (lambda folder: (folder / "mlxd.json").write_text("{"), "mlxd.json cannot be read"),
    ],
    ids=["tokenizer", "config", "weights", "card"],
)
def test_a_broken_model_is_listed_with_its_error(tmp_path: Path, spoil, told: str) -> None:  # type: ignore[no-untyped-def]
    spoil(write_model(models(tmp_path) / "tiny"))
    (entry,) = scan(tmp_path)
    assert entry.id == "tiny"
    assert told in entry.error
    assert "\n" not in entry.error


ENTRIES = [
    ModelEntry(id="org/Alpha-1B", path=Path("/m/a"), aliases=["starter"]),
    ModelEntry(id="other/Beta", path=Path("/m/b")),
    ModelEntry(id="org/Beta", path=Path("/m/c"), aliases=["b"]),
]


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("org/Alpha-1B", "org/Alpha-1B"),
        ("starter", "org/Alpha-1B"),
        ("Alpha-1B", "org/Alpha-1B"),
        ("alpha-1b", "org/Alpha-1B"),
        ("ORG/beta", "org/Beta"),
        ("b", "org/Beta"),
    ],
)
def test_a_model_is_found_by_id_alias_or_last_part(name: str, model_id: str) -> None:
    assert resolve(name, ENTRIES).id == model_id


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Beta", "may mean other/Beta, org/Beta"),
        ("Alpha-2B", "did you mean org/Alpha-1B"),
        ("zzzzzz", "there is org/Alpha-1B, other/Beta, org/Beta"),
        ("./nowhere/at/all", "no model folder ./nowhere/at/all"),
    ],
)
def test_an_unknown_or_unclear_name_is_refused_with_what_there_is(name: str, told: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(name, ENTRIES)
    assert caught.value.failure.code == ErrorCode.MODEL_NOT_FOUND
    assert told in caught.value.failure.message


def test_a_folder_anywhere_can_be_named_by_its_path(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    entry = resolve(str(folder), [])
    assert (entry.id, entry.path, entry.error) == ("mine", folder, "")


def test_without_a_name_the_only_or_the_starter_model_is_meant() -> None:
    assert default_entry(ENTRIES[1:2]).id == "other/Beta"
    assert default_entry(ENTRIES).id == "org/Alpha-1B"
    broken = ModelEntry(id="x", path=Path("/m/x"), error="no config.json")
    assert default_entry([broken, ENTRIES[2]]).id == "org/Beta"
    for entries, told in (
        (ENTRIES[1:], "several models"),
        ([], "pull starter"),
        ([broken], "no config.json"),
    ):
        with pytest.raises(Refused, match=told):
            default_entry(entries)


def test_the_float_type_is_the_one_that_most_bytes_have() -> None:
    assert float_type({"F32": 8, "BF16": 90, "U32": 1000}) == "bfloat16"
    assert float_type({"U32": 1}) == ""


def test_the_note_says_why_only_where_floats_are_widened() -> None:
    assert dtype_note("bfloat16", "", float32=False) == ""
    notes = {
        dtype_note("bfloat16", "", float32=True),
        dtype_note("float32", "", float32=True),
        dtype_note("float16", "affine 4-bit group 64", float32=True),
    }
    assert len(notes) == 3
    assert all("CPU" in note for note in notes)


def a_fit(memory: int, context: int = 100) -> Fit:
    return Fit(
        weights_bytes=1000,
        context=context,
        kv_bytes=context * 10,
        kv_bytes_per_token=10,
        transient_bytes=500,
        memory_bytes=memory,
    )


def test_the_bill_is_the_sum_of_its_lines_and_the_verdict_follows() -> None:
    fit = a_fit(memory=3000)
    assert (fit.needed_bytes, fit.usable_bytes, fit.fits) == (2500, 2700, True)
    assert "fits, with 200 B to spare" in explain(fit)[-1]
    assert "100 tokens x 10 B a token" in explain(fit)[1]
    assert "up to --context 30 would" in explain(a_fit(memory=2000))[-1]
    assert "the weights alone leave no room" in explain(a_fit(memory=1000))[-1]


@given(memory=st.integers(0, 10_000), context=st.integers(1, 1000))
def test_the_largest_context_is_the_last_that_fits(memory: int, context: int) -> None:
    largest = a_fit(memory, context).largest_context
    if largest:
        assert a_fit(memory, largest).fits
    assert not a_fit(memory, largest + 1).fits


def test_16_bit_tensors_double_where_floats_are_widened() -> None:
    dtypes = {"BF16": 10, "F16": 10, "F32": 100, "U32": 1000}
    assert loaded_bytes(dtypes, float32=True) == 1140
    assert loaded_bytes(dtypes, float32=False) == 1120


def test_one_step_grows_with_chunk_and_context_but_not_past_the_context() -> None:
    shape = Shape(hidden=64, intermediate=128, heads=4, vocab=100)
    assert transient_bytes(shape, 512, 1) == 4 * (4 * 64 + 3 * 128 + 4 * 512 + 100)
    assert transient_bytes(shape, 512, 64) > transient_bytes(shape, 512, 32)
    assert transient_bytes(shape, 16, 64) == transient_bytes(shape, 16, 16)
