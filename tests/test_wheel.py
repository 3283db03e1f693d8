"""The wheel is an application: three packages and nothing else, and it runs wherever the user stands."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from shared.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree, without fetching anything."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_three_packages_with_the_page_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "parent",
        "worker",
        "shared",
        f"mlxd-{VERSION}.dist-info",
    }
    for file in (ROOT / "parent" / "static").rglob("*"):
        if file.is_file():
            assert file.relative_to(ROOT).as_posix() in names
    assert f"mlxd-{VERSION}.dist-info/licenses/LICENSE" in names
    ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[pws]*/**/*.py")}
    assert {name for name in ours if not name.startswith("tests/")} <= set(names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel. The dependencies come from this environment by a
    path file: what is under test is our wheel, and nothing is fetched.
    """
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    here = sysconfig.get_path("purelib")
    # `addsitedir` would also run the path files there, the editable install of this checkout among them.
    (site / "dependencies.pth").write_text(f"{here}\n")
    return venv / "bin"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory of a user that holds folders with our names."""
    for name in ("worker", "parent", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
        (tmp_path / name / "__main__.py").write_text("raise SystemExit('the decoy was run')\n")
    return tmp_path


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False)


def test_the_installed_command_runs_from_a_hostile_directory(installed: Path, hostile: Path) -> None:
    version = run(installed, hostile, "mlxd", "--version")
    assert (version.returncode, version.stdout) == (0, f"mlxd {VERSION}\n"), version.stderr
    doctor = run(installed, hostile, "mlxd", "doctor", "--port", "0")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert str(installed.parent) in doctor.stdout, "it is the installed mlxd that answers, not the checkout"


def test_a_job_worker_is_ours_in_a_hostile_directory(installed: Path, hostile: Path) -> None:
    script = (
        "import asyncio\n"
        "from parent.jobs.run import run_job\n"
        "from shared.jobs import NoopJob\n"
        "print(asyncio.run(run_job(NoopJob(steps=2), 'out')))\n"
    )
    done = run(installed, hostile, "python", "-P", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "JobDone" in done.stdout
    assert "decoy" not in done.stdout + done.stderr
