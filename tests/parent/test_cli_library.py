"""`ls`, `rm`, `import` and `fit`: what is listed, what is deleted and what never is, and what fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.parent.commands import run
from tests.parent.hf_caches import HfCache
from tests.parent.models import write_model


def test_ls_of_an_empty_library_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls") == 0
    assert "mlxd pull starter" in capsys.readouterr().out


def test_ls_shows_names_types_and_broken_models(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_model(data / "models" / "bad") / "tokenizer.json").unlink()
    assert run("ls") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["MODEL", "ALIASES", "ROOT", "FAMILY", "SIZE", "TYPE", "CONTEXT", "SUPPORT"]
    assert rows[0].split() == ["bad", "-", "own", "-", "-", "-", "-", "broken"]
    assert rows[1].split() == ["org/tiny", "t", "own", "llama", "12.8", "kB", "bfloat16", "512", "native"]
    assert any("no tokenizer.json" in row for row in rows[2:])
    assert run("ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [model["id"] for model in listed] == ["bad", "org/tiny"]
    assert listed[1]["path"] == str(tiny)
    assert (listed[1]["aliases"], listed[1]["support"]) == (["t"], "native")
    assert "config" not in listed[1]
    assert (listed[0]["fits"], listed[0]["total_bytes"], listed[0]["loads_with_bytes"]) == (None, None, None)


@pytest.mark.parametrize(("budget", "verdict"), [("64GB", "fully"), ("1GB", "partly"), ("1kB", "no")])
def test_ls_says_in_json_whether_a_model_fits(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str], budget: str, verdict: str
) -> None:
    (data / "mlxd.toml").write_text(f'memory_budget_bytes = "{budget}"\n')
    assert run("ls", "--json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["fits"] == verdict
    assert listed["bytes"] <= listed["loads_with_bytes"] <= listed["total_bytes"]
    assert run("fit", "t") == (0 if verdict == "fully" else 1)
    assert listed["usable_bytes"] == {"64GB": 64 * 10**9, "1GB": 10**9, "1kB": 1000}[budget]


def test_ls_shows_every_root_and_names_of_the_settings_file(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "more" / "extra-one", model_type="gemma2")
    HfCache(tmp_path / "hf" / "hub").commit("org/cached", "1" * 40, ref="main", hidden_size=32)
    text = f'model_dirs = ["{tmp_path / "more"}"]\n[models."org/cached"]\naliases = ["c"]\n'
    (data / "mlxd.toml").write_text(text)
    assert run("ls") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("extra-one", "-", "extra"),
        ("org/cached", "c", "hf"),
        ("org/tiny", "t", "own"),
    ]
    assert rows[0][-1] == "extra"
    assert run("fit", "c", "--context", "100") == 0
    assert "org/cached, 100 tokens" in capsys.readouterr().out


def test_rm_never_touches_what_is_not_its_own_and_says_how(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = HfCache(tmp_path / "hf" / "hub").commit("org/cached", "1" * 40, ref="main")
    extra = write_model(tmp_path / "more" / "org" / "other")
    data.mkdir()
    (data / "mlxd.toml").write_text(f'model_dirs = ["{tmp_path / "more"}"]\n')
    for name, told in (("cached", "`hf cache rm model/org/cached`"), ("other", "delete it yourself")):
        assert run("rm", name, "--yes") == 1
        assert told in capsys.readouterr().err
    assert (snapshot / "config.json").exists()
    assert (extra / "config.json").exists()


def test_fit_counts_with_the_options_of_the_model_and_the_budget_of_the_settings(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "mlxd.toml").write_text(
        'memory_budget_bytes = "2GB"\n[models."org/tiny"]\nmax_rows = 3\nprefix_cache_bytes = 0\nmax_context = 50\n'
    )
    assert run("fit", "t") == 0
    out = capsys.readouterr().out
    assert "org/tiny, 50 tokens" in out
    assert "3 rows x 50 tokens" in out
    assert re.search(r"^usable +2 GB +.*of the setting memory_budget_bytes$", out, re.MULTILINE)


def test_rm_deletes_the_model_and_its_empty_organisation(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rm", "tiny", "--yes") == 0
    assert "org/tiny is deleted" in capsys.readouterr().out
    assert list((data / "models").iterdir()) == []


def test_rm_of_a_link_leaves_what_it_points_to(tiny: Path, data: Path, tmp_path: Path) -> None:
    elsewhere = write_model(tmp_path / "elsewhere")
    (data / "models" / "linked").symlink_to(elsewhere)
    assert run("rm", "linked", "--yes") == 0
    assert elsewhere.is_dir()
    assert not (data / "models" / "linked").exists()


def test_rm_never_leaves_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "mine")
    assert run("rm", str(folder), "--yes") == 1
    assert "is not in the library" in capsys.readouterr().err
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["../up", "a/b/c", ".hidden", "a b", "", "/abs", "a/.b"])
def test_import_refuses_a_name_that_would_leave_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = tmp_path / "....gguf"
    file.write_bytes(b"")
    assert run("import", str(file), f"--name={name}") == 2
    assert "cannot be a model's name" in capsys.readouterr().err


def test_import_asks_before_it_replaces(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert run("import", str(file), "--name", "org/tiny") == 2
    assert "There is a model org/tiny already" in capsys.readouterr().err


def test_an_import_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a gguf file at all")
    assert run("import", str(file)) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("mlxd: ")
    assert "GGUF" in err[-1]
    assert [item for item in (data / "models").rglob("*") if item.is_file()] == []


def test_fit_shows_the_arithmetic_and_tells_by_its_exit_code(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", "t", "--context", "100") == 0
    out = capsys.readouterr().out
    assert "org/tiny, 100 tokens of context" in out
    assert "100 tokens x" in out
    assert "fits, with" in out
    assert "8 rows x 100 tokens x" in out
    assert re.search(r"^prefix cache +1\.07 GB", out, re.MULTILINE)
    write_model(data / "models" / "vast", max_position_embeddings=10**12)
    assert run("fit", "vast") == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        (
            {"model_type": "unheard"},
            "family 'unheard' is not supported: native are llama, mistral, ministral3",
        ),
    ],
)
def test_a_model_that_cannot_be_served_never_fits_and_every_command_says_why(
    data: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], told: str
) -> None:
    write_model(data / "models" / "odd", **config)
    for words in (["fit", "odd"], ["serve", "odd"], ["serve"]):
        assert run(*words) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert told in err
        assert err.count("\n") == 1
    assert run("ls") == 0
    out = capsys.readouterr().out
    assert told in out
    assert out.splitlines()[1].split()[-1] == ("unsupported" if "model_type" in config else "broken")
