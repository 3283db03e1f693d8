"""The library in front of the BLAS: built once, checked, and never used when it is not right."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parent.config import load_settings
from parent.workers import blas, one_row

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or COMPILER is None,
    reason="needs Linux and a C compiler; elsewhere it is not used",
)


@pytest.fixture
def library(tmp_path) -> str:
    settings = load_settings({"data_dir": str(tmp_path)}, {}, home=tmp_path).settings
    chosen = blas.choose(settings).path
    if not chosen:
        pytest.skip(f"no BLAS to stand in front of: {blas.install_hint()}")
    return chosen


def test_it_is_built_once_and_computes_what_the_blas_does(library, tmp_path):
    first = one_row.build(library, tmp_path / "cache")
    assert first is not None
    assert one_row.is_right(first, library)
    made = first.stat().st_mtime_ns
    assert one_row.build(library, tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == made
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        first.name,
        "blas.json",
    }  # no scratch left


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("alpha, b, ldb", "2 * alpha, b, ldb"),
        ("p->alpha * sum", "p->alpha * sum * 1.01f"),
        ("p->n ? begin + p->piece", "p->n ? begin + p->piece - 1"),  # what several threads take
    ],
)
def test_one_that_computes_something_else_is_noticed(library, tmp_path, right, wrong):
    source = one_row.SOURCE.read_text()
    assert right in source
    changed = source.replace(right, wrong)
    wrong = tmp_path / "wrong.c"
    wrong.write_text(changed)
    made = tmp_path / "wrong.so"
    subprocess.run([COMPILER, *one_row.FLAGS, "-o", str(made), str(wrong), "-ldl"], check=True)
    assert not one_row.is_right(made, library)


def test_a_cache_that_cannot_be_written_means_going_without(library, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert one_row.build(library, blocked / "cache") is None
    assert one_row.build(str(Path("/nowhere/libopenblas.so")), tmp_path) is None
    assert one_row.build(library, tmp_path / "with space") is None  # the loader would split the path


def test_the_worker_gets_both_in_order_and_is_told(library, tmp_path):
    settings = load_settings({"data_dir": str(tmp_path)}, {}, home=tmp_path).settings
    env, line = blas.worker_env(settings)
    front, behind, *_ = env["LD_PRELOAD"].split(":")
    assert front.endswith(".so")
    assert behind == library
    assert "products of up to 16 rows by our kernel" in line
    assert env["MLXD_BLAS_NAME"] == line
