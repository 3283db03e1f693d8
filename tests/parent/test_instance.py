"""The lock of a data folder: one holder whatever the race, and one line for whatever forbids it."""

import subprocess
import sys
from pathlib import Path

import pytest

from parent.instance import Instance, read_owner
from shared.errors import Refused

ROOT = Path(__file__).resolve().parents[2]

# Claims and releases; a marker that is there already, or any error but a refusal, ends it with a traceback.
CONTENDER = """
import sys
from pathlib import Path
from parent.instance import Instance
from shared.errors import Refused
held = 0
while held < 300:
    instance = Instance(Path(sys.argv[1]))
    try:
        instance.claim()
    except Refused:
        continue
    with open(sys.argv[2], "x"):
        assert instance.runtime_dir.is_dir()
    Path(sys.argv[2]).unlink()
    instance.release()
    held += 1
"""

FULL = """
import resource, sys
from pathlib import Path
from parent.instance import Instance
from shared.errors import Refused
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    Instance(Path(sys.argv[1])).claim()
except Refused as refused:
    print(refused)
"""


def test_a_lock_has_one_holder_at_a_time_however_many_try(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTENDER, str(tmp_path / "data"), str(tmp_path / "marker")]
    running = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in running] == [""] * 3
    assert list((tmp_path / "data").iterdir()) == []


def test_a_claim_is_announced_and_leaves_nothing(tmp_path: Path) -> None:
    with Instance(tmp_path / "data") as instance:
        instance.announce("http://a-long-address.example:8080")
        instance.announce("http://b")
        owner = read_owner(tmp_path / "data" / "mlxd.lock")
        assert owner is not None
        assert owner.url == "http://b"
        with pytest.raises(Refused, match=r"served already by process \d+ at http://b"):
            Instance(tmp_path / "data").claim()
        assert instance.runtime_dir.is_dir()
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("blocked", ["data", "data/run", "data/mlxd.lock"])
def test_what_stands_in_the_way_is_named_and_nothing_stays_held(tmp_path: Path, blocked: str) -> None:
    path = tmp_path / blocked
    path.parent.mkdir(exist_ok=True)
    if path.name == "mlxd.lock":
        path.mkdir()
    else:
        path.write_text("in the way")
    with pytest.raises(Refused) as refused:
        Instance(tmp_path / "data").claim()
    message = str(refused.value)
    assert f"cannot write in the data folder {tmp_path / 'data'}" in message
    assert f"{path}: " in message
    assert "remove it, or set MLXD_DATA_DIR" in message
    path.rmdir() if path.is_dir() else path.unlink()
    with Instance(tmp_path / "data"):
        pass


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path / "data")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith(f"cannot write in the data folder {tmp_path / 'data'}: ")
    assert said.count("\n") == 1
    assert list((tmp_path / "data").iterdir()) == []
