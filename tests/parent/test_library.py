"""The catalog: which folders of the own root are models, and their facts and faults."""

import sys
from pathlib import Path
from typing import Any

import pytest

from parent.library import catalog, families
from parent.library.catalog import (
    ModelEntry,
    default_entry,
    dtype_note,
    float_type,
    folder_of,
    read_entry,
    shown,
)
from parent.library.families import FAMILIES
from shared.errors import Refused
from shared.kv_layout import kv_bytes, kv_layers
from tests.parent.models import scan, write_model


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


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_attention_heads": [4]}, "num_attention_heads is [4]"),
        ({"num_attention_heads": 0, "head_dim": 16}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"sliding_window": "all"}, "sliding_window is 'all'"),
        ({"layer_types": 5}, "layer_types is not a list"),
        ({"quantization": {"bits": 4, "model.x": {"bits": "four"}}}, "not understood"),
        ({"num_hidden_layers": "9" * 1000}, "num_hidden_layers is '999"),
    ],
)
def test_a_config_that_cannot_be_counted_with_is_listed_with_the_key_at_fault(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    write_model(models(tmp_path) / "tiny", **config)
    (entry,) = scan(tmp_path)
    assert told in entry.error
    assert "config.json" in entry.error or "not understood" in entry.error
    assert "\n" not in entry.error
    assert len(entry.error) < 300 + len(str(tmp_path))
    assert not entry.unsupported


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gemma2", "'gemma2' is not a native one; the extra mlx-lm serves it: pip install 'mlxd[mlx-lm]'"),
        ("smolvlm", "'smolvlm' is not supported: native are llama, mistral"),
        ("smolvlm", "mlx-lm is not known to have it; mlx-vlm has it"),
        ("unheard", "mlx-lm is not known to have it; choose a model of one of these, or another server"),
    ],
)
def test_an_unsupported_family_is_listed_with_what_is_supported_and_what_would_serve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, told: str
) -> None:
    monkeypatch.setattr(families, "mlx_lm_version", lambda: "")
    write_model(models(tmp_path) / "tiny", model_type=family)
    (entry,) = scan(tmp_path)
    assert entry.unsupported
    assert told in entry.error


def test_the_families_are_those_of_the_worker() -> None:
    from worker.models import FAMILIES as HELD

    assert set(FAMILIES) == set(HELD)


def test_a_folder_is_named_by_its_path_and_nothing_else_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert folder_of(str(folder)) == folder_of("mine") == folder
    for name in ("", " ", "~no-such-user-here/x", "x" * 5000, "a\0b", "nowhere"):
        assert folder_of(name) is None


def test_without_a_name_the_starter_is_meant_else_the_first_by_id() -> None:
    starter = ModelEntry(id="z", path=Path("/m/z"), aliases=["starter"])
    beta, alpha = (ModelEntry(id=name, path=Path("/m") / name) for name in ("beta", "alpha"))
    broken = ModelEntry(id="a", path=Path("/m/x"), error="no config.json")
    assert default_entry([beta, alpha, starter]).id == "z"
    assert default_entry([broken, beta, alpha]).id == "alpha"
    for entries, told in (([], "pull starter"), ([broken], "no config.json")):
        with pytest.raises(Refused, match=told):
            default_entry(entries)


def test_weights_with_fewer_layers_than_the_config_says_are_a_broken_model(tmp_path: Path) -> None:
    entry = read_entry(write_model(tmp_path / "cut", tensor="model.layers.0.mlp.up_proj.weight"), "cut")
    assert "num_hidden_layers is 2, but the weights hold 1 layers" in entry.error
    assert entry.config == {}


@pytest.mark.parametrize(
    ("family", "version", "support", "note"),
    [
        ("llama", "", "native", ""),
        ("gemma2", "", "extra", "the extra mlx-lm serves it: pip install"),
        ("gemma2", "0.32.2", "extra", "by the extra mlx-lm 0.32.2"),
        ("smolvlm", "0.32.2", "unsupported", "mlx-vlm has it"),
        ("unheard", "0.32.2", "unsupported", "family 'unheard' is not supported"),
    ],
)
def test_an_entry_says_what_would_serve_it_and_has_its_facts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, version: str, support: str, note: str
) -> None:
    for module in (families, catalog):
        monkeypatch.setattr(module, "mlx_lm_version", lambda: version)
    entry = read_entry(write_model(tmp_path / "x", model_type=family), "x")
    assert entry.support == support
    assert note in entry.support_note
    assert bool(entry.error) == (support == "unsupported" or (support == "extra" and not version))
    assert (entry.family, entry.bytes, entry.context, entry.modalities) == (family, 12800, 512, ["text"])
    assert entry.dtypes == {"BF16": 12800}


def test_a_family_that_is_not_ours_is_billed_as_if_all_layers_kept_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention", "linear_attention"]
    folder = write_model(tmp_path / "x", model_type="gemma2", layer_types=kinds, sliding_window=16)
    entry = read_entry(folder, "x")
    assert entry.kv_bytes_per_token == read_entry(write_model(tmp_path / "y"), "y").kv_bytes_per_token > 0
    assert kv_bytes(kv_layers(entry.config), 100) == 100 * kv_bytes(kv_layers(entry.config), 1)


def test_sizes_are_found_under_other_names_and_what_cannot_be_counted_with_is_not() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 99}
    counted = families.foreign_config(gpt2)
    assert (counted["num_hidden_layers"], counted["head_dim"], counted["intermediate_size"]) == (2, 16, 256)
    assert families.foreign_config({"model_type": "gpt2", "n_layer": 2}) == {}


def test_a_model_with_an_interpreter_of_its_own_is_for_its_worker_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "mlx_lm_version", lambda: "")
    for family, refused in (("gemma2", False), ("unheard", True)):
        entry = read_entry(write_model(tmp_path / family, model_type=family), "x")
        assert catalog.by_another_python(entry, "") == entry
        assert bool(catalog.by_another_python(entry, "/opt/v/bin/python").error) == refused


def test_weights_of_another_tools_quantization_are_unsupported_and_not_broken(tmp_path: Path) -> None:
    entry = read_entry(
        write_model(tmp_path / "x", quantization_config={"quant_method": "gptq", "bits": 4}), "x"
    )
    assert (entry.support, entry.unsupported) == ("unsupported", True)
    assert "'gptq'" in entry.support_note


def test_people_see_no_config_in_json(tmp_path: Path) -> None:
    entry = read_entry(write_model(tmp_path / "x"), "x")
    assert entry.config["hidden_size"] == 64
    assert "config" not in shown(entry)
    assert shown(entry)["path"] == str(tmp_path / "x")


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
