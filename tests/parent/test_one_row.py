"""The library in front of the BLAS: built once, checked, and never used when it is not right."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parent.config import load_settings
from parent.workers import blas, one_row
from tests.parent.commands import run

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
    front = one_row.build(library, tmp_path / "cache")
    first = front.path
    assert first is not None
    assert front.is_new
    assert one_row.check(first, library) == ""
    (tmp_path / "link").symlink_to(first.parent)  # a data folder that lies elsewhere
    assert one_row.check(tmp_path / "link" / first.name, library) == ""
    made = first.stat().st_mtime_ns
    assert one_row.build(library, tmp_path / "cache") == one_row.Front(first)
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
    assert one_row.check(made, library) == one_row.WRONG


# Compilers: the one of this machine, but ...
FULL = 'echo "as: fatal error: error writing to x.o: No space left on device" >&2; exit 1'
SHORT = 'while [ "$1" != -o ]; do shift; done; : > "$2"'  # says that all is well, and has written nothing
CUT = f'{COMPILER} "$@"; while [ "$1" != -o ]; do shift; done; truncate -s 5000 "$2"'
KILLED = "kill -KILL $$"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (FULL, "No space left on device"),
        (KILLED, "ended with -9"),
        (SHORT, "the loader does not take it"),
        (CUT, "its check ended with"),
    ],
)
def test_a_compiler_that_failed_is_asked_again(library, tmp_path, monkeypatch, script, told):
    tools, cache = tmp_path / "tools", tmp_path / "cache"
    tools.mkdir()
    (tools / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "cc").chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        failed = one_row.build(library, cache)
    assert failed.path is None
    assert told in failed.reason
    assert [path.name for path in cache.iterdir() if path.name != "blas.json"] == []
    made = one_row.build(library, cache)
    assert made.path is not None
    assert made.is_new


def test_a_compiler_that_hangs_is_asked_again(library, tmp_path, monkeypatch):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    with monkeypatch.context() as patched:
        patched.setattr(one_row.subprocess, "run", hang)
        assert "did not end within 60 s" in one_row.build(library, tmp_path / "cache").reason
    assert one_row.build(library, tmp_path / "cache").path is not None


@pytest.mark.parametrize("left", [0, 5000])
def test_a_file_that_is_not_whole_is_made_again(library, tmp_path, left):
    made = one_row.build(library, tmp_path / "cache").path
    whole = made.stat().st_size
    os.truncate(made, left)
    again = one_row.build(library, tmp_path / "cache")
    assert (again.path, again.is_new) == (made, True)
    assert made.stat().st_size == whole


def test_only_one_that_computes_wrongly_is_remembered(library, tmp_path, monkeypatch):
    source = tmp_path / "wrong.c"
    source.write_text(one_row.SOURCE.read_text().replace("p->alpha * sum", "p->alpha * sum * 1.01f"))
    monkeypatch.setattr(one_row, "SOURCE", source)
    assert "computes wrongly" in one_row.build(library, tmp_path / "cache").reason
    monkeypatch.setattr(one_row, "_make", None)  # not to be called again
    assert "computes wrongly" in one_row.build(library, tmp_path / "cache").reason


def test_a_worker_without_it_is_told_why(library, tmp_path, monkeypatch):
    settings = load_settings({"data_dir": str(tmp_path)}, {}, home=tmp_path).settings
    blas.choose(settings)
    monkeypatch.setattr(one_row, "_compiled", lambda command: "cc ended with 1: the disk is full")
    env, line = blas.worker_env(settings)
    assert line.endswith("without our kernel for products of few rows: cc ended with 1: the disk is full")
    assert env["LD_PRELOAD"].split(":")[0] == library
    assert env["MLXD_BLAS_NAME"] == line


def test_a_cache_that_cannot_be_written_means_going_without(library, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for made, told in (
        (one_row.build(library, blocked / "cache"), "Not a directory"),
        (one_row.build(str(Path("/nowhere/libopenblas.so")), tmp_path), "No such file"),
        (one_row.build(library, tmp_path / "with space"), "a space"),  # the loader would split the path
    ):
        assert made.path is None
        assert told in made.reason


def test_the_worker_gets_both_in_order_and_is_told(library, tmp_path):
    settings = load_settings({"data_dir": str(tmp_path)}, {}, home=tmp_path).settings
    env, line = blas.worker_env(settings)
    front, behind, *_ = env["LD_PRELOAD"].split(":")
    assert front.endswith(".so")
    assert behind == library
    assert "products of up to 16 rows by our kernel" in line
    assert env["MLXD_BLAS_NAME"] == line


def test_doctor_says_when_it_is_missing_and_why(library, tmp_path, monkeypatch, capsys):
    def kernel() -> dict[str, str]:
        run("doctor", "--json", "--port", "0", "--data-dir", str(tmp_path))
        return next(
            each for each in json.loads(capsys.readouterr().out) if each["subject"] == "kernel for few rows"
        )

    with monkeypatch.context() as patched:
        patched.setattr(one_row, "_compiled", lambda command: "cc ended with 1: the disk is full")
        found = kernel()
    assert found["state"] == "advice"
    assert "cc ended with 1: the disk is full" in found["finding"]
    assert kernel()["state"] == "ok"
