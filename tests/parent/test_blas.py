"""The choice of BLAS: what is a candidate, what a child says of it, and what a worker's environment gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parent.config import Settings
from parent.workers.blas import candidates, choose, parse_loader_cache, probe, worker_env
from shared.errors import ErrorCode, Refused

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is how Linux does it")

LISTING = """\
312 libs found in cache `/etc/ld.so.cache'
	libopenblasp.so.0 (libc6,x86-64) => /usr/lib64/libopenblasp.so.0
	libopenblas.so.0 (libc6,x86-64) => /lib/x86_64-linux-gnu/libopenblas.so.0
	libblas.so.3 (libc6,x86-64) => /lib/x86_64-linux-gnu/libblas.so.3
	libmkl_rt.so.2 (libc6,x86-64) => /opt/intel/libmkl_rt.so.2
	libblis.so.4 (libc6,x86-64) => /usr/lib64/libblis.so.4
	libnotopenblas.so.0 (libc6) => /usr/lib/libnotopenblas.so.0
"""


def settings(tmp_path: Path, blas: str = "auto") -> Settings:
    return Settings(data_dir=tmp_path, blas=blas)


def a_library_without_blas() -> Path:
    """Any shared library of the C runtime that is loaded in this very process."""
    maps = Path("/proc/self/maps").read_text()
    return Path(next(line.split()[-1] for line in maps.splitlines() if "libc.so" in line or "libc-" in line))


def test_the_loader_cache_gives_optimised_libraries_only() -> None:
    assert [path.name for path in parse_loader_cache(LISTING)] == [
        "libopenblasp.so.0",
        "libopenblas.so.0",
        "libmkl_rt.so.2",
        "libblis.so.4",
    ]


def test_candidates_exist_and_are_named_once() -> None:
    found = list(candidates("x86_64"))
    assert all(path.is_file() for path in found)
    assert len({path.resolve() for path in found}) == len(found)


@linux_only
def test_a_library_without_cblas_is_told_so(tmp_path: Path) -> None:
    found = probe(a_library_without_blas(), tmp_path / "blas.json")
    assert (found.usable, found.about) == (False, "exports no cblas_sgemm under its plain name")


def test_a_file_that_is_no_library_is_refused_as_a_setting(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a library")
    if sys.platform == "darwin":
        pytest.skip("macOS workers use Accelerate whatever the setting says")
    for path, told in ((text, "notes.txt"), (tmp_path / "absent.so", "cannot be read")):
        with pytest.raises(Refused, match=told) as caught:
            worker_env(settings(tmp_path, str(path)))
        assert (caught.value.failure.code, caught.value.failure.param) == (ErrorCode.INVALID_REQUEST, "blas")


@linux_only
def test_a_probe_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "blas.json"
    library = tmp_path / "libx.so"
    library.write_text("one")
    first = probe(library, cache)
    # The memory is what answers: an edited record is what comes back for the unchanged file.
    cache.write_text(cache.read_text().replace('"usable":false', '"usable":true'))
    assert probe(library, cache).usable
    library.write_text("three")
    assert not probe(library, cache).usable
    assert not first.usable
    cache.write_text("{damaged")
    assert not probe(library, cache).usable


@linux_only
def test_none_leaves_the_environment_alone(tmp_path: Path) -> None:
    env, description = worker_env(settings(tmp_path, "none"))
    assert "LD_PRELOAD" not in env
    assert "blas = none" in description
    assert "set blas = auto" in description


@linux_only
def test_the_best_candidate_is_preloaded_before_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose(settings(tmp_path))
    if not chosen.path:
        assert chosen.advice, "without a better BLAS there must be advice"
        pytest.skip(f"this machine has none: {chosen.advice}")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    env, description = worker_env(settings(tmp_path))
    assert [path for path in env["LD_PRELOAD"].split(":") if "one_row" not in path] == [chosen.path]
    assert env["MLXD_BLAS_NAME"] == description
    assert chosen.path in description
    other = str(a_library_without_blas())
    monkeypatch.setenv("LD_PRELOAD", other)
    assert worker_env(settings(tmp_path))[0]["LD_PRELOAD"].endswith(f"{chosen.path}:{other}")


@linux_only
def test_a_child_gets_the_library_and_this_process_does_not(tmp_path: Path) -> None:
    env, _ = worker_env(settings(tmp_path))
    if "LD_PRELOAD" not in env:
        pytest.skip("this machine has no better BLAS")
    script = "print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True, check=True
    ).stdout
    name = Path(env["LD_PRELOAD"].split(":")[0]).resolve().name
    assert name in maps
    assert "LD_PRELOAD" not in os.environ or env["LD_PRELOAD"] != os.environ["LD_PRELOAD"]
    fresh = "from parent.workers import blas; from parent.config import Settings; from pathlib import Path; "
    fresh += f"blas.choose(Settings(data_dir=Path({str(tmp_path)!r}))); print(open('/proc/self/maps').read())"
    bare = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True, check=True).stdout
    assert name not in bare
