"""The lock of a data folder: one holder whatever the race, and one line for whatever forbids it. What a dead server
left: its workers' folder is found again, and cleared of everything else.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from parent import handover
from parent.instance import PREFIX, Instance, Owner, read_owner
from parent.workers import runtime_file
from parent.workers.process import started_at
from parent.workers.runtime_file import RuntimeRecord
from shared.control import LaunchModel
from shared.errors import Refused
from shared.version import VERSION, WIRE

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


def record(folder: Path, name: str, pid: int = 2**22 + 1, began: float = 1.0) -> RuntimeRecord:
    """Of a worker with both of its sockets in `folder`."""
    paths = [folder / f"{name}-1.{kind}" for kind in ("sock", "ctl")]
    for path in paths:
        path.touch()
    return RuntimeRecord(
        name=name,
        pid=pid,
        start_time=began,
        socket=str(paths[0]),
        adopt_socket=str(paths[1]),
        nonce="n",
        wire=WIRE,
        version=VERSION,
        launch=LaunchModel(model_id="m", path="/m"),
        command=["worker"],
        epoch=1,
    )


def a_dead_servers(data_dir: Path, folder: Path, *names: str) -> list[RuntimeRecord]:
    """What is left in `folder` of a server that was killed."""
    data_dir.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)
    records = [record(folder, name) for name in names]
    runtime_file.write(folder / runtime_file.NAME, records)
    (folder / "x-9.sock").touch()
    owner = Owner(2**22 + 1, "http://127.0.0.1:1", str(folder))
    (data_dir / "mlxd.lock").write_bytes(msgspec.json.encode(owner))
    return records


@pytest.fixture
def elsewhere():
    folder = Path(f"/tmp/{PREFIX}test-{os.getpid()}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("short", [False, True])
def test_the_folder_of_workers_that_may_live_is_used_again_and_the_rest_of_it_goes(
    tmp_path: Path, short: bool, elsewhere: Path
) -> None:
    folder = elsewhere if short else tmp_path / "data" / "run"
    left = a_dead_servers(tmp_path / "data", folder, "a", "b")
    with Instance(tmp_path / "data") as instance:
        assert instance.runtime_dir == folder
        assert instance.leftovers() == left
        assert {path.name for path in folder.iterdir()} == {
            runtime_file.NAME,
            *(f"{name}-1.{kind}" for name in "ab" for kind in ("sock", "ctl")),
        }
        owner = read_owner(tmp_path / "data" / "mlxd.lock")
        assert owner is not None
        assert owner.runtime == str(folder)
        asyncio.run(instance.clear_leftovers([left[0]]))
        assert instance.leftovers() == []
        assert not Path(left[1].adopt_socket).exists()
        assert Path(left[0].adopt_socket).exists()
    assert not folder.exists()


def test_workers_that_nobody_settled_are_left_to_the_next_server(tmp_path: Path) -> None:
    left = a_dead_servers(tmp_path / "data", tmp_path / "data" / "run", "a")
    for _ in range(2):  # a server that finds its port taken, say
        with Instance(tmp_path / "data") as instance:
            assert instance.leftovers() == left
    assert Path(left[0].adopt_socket).exists()


def test_the_folder_where_processes_of_jobs_listen_is_used_again_until_they_are_settled(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    for name in ("j0a1b2c3d.ctl", "w0-1.sock", "other"):
        (folder / name).touch()
    for is_settled in (False, True):
        with Instance(tmp_path) as instance:
            assert instance.runtime_dir == folder
            assert {path.name for path in folder.iterdir()} == {"j0a1b2c3d.ctl"}
            if is_settled:
                asyncio.run(instance.clear_leftovers())
        assert folder.exists() is not is_settled


def test_a_folder_elsewhere_that_is_not_ours_is_not_used(tmp_path: Path, elsewhere: Path) -> None:
    a_dead_servers(tmp_path / "data", elsewhere, "a")
    real = elsewhere.with_name(elsewhere.name + "-real")
    elsewhere.rename(real)
    try:
        elsewhere.symlink_to(real)
        with Instance(tmp_path / "data") as instance:
            assert instance.runtime_dir == tmp_path / "data" / "run"
            assert instance.leftovers() == []
        assert (real / runtime_file.NAME).exists()
    finally:
        elsewhere.unlink()
        shutil.rmtree(real)


def test_clearing_ends_a_worker_and_never_a_stranger_with_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "run"
    sleeper = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(sleeper, stdin=subprocess.PIPE, start_new_session=True) as worker,
        subprocess.Popen(sleeper, stdin=subprocess.PIPE, start_new_session=True) as stranger,
    ):
        a_dead_servers(tmp_path / "data", folder)
        runtime_file.write(
            folder / runtime_file.NAME,
            [
                record(folder, "a", worker.pid, started_at(worker.pid)),
                record(folder, "b", stranger.pid, started_at(stranger.pid) - 1),
            ],
        )
        with Instance(tmp_path / "data") as instance:
            asyncio.run(instance.clear_leftovers())
        worker.wait(10)
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0


def test_a_lock_that_is_handed_over_stays_held(tmp_path: Path) -> None:
    first = Instance(tmp_path / "data")
    first.claim()
    second = Instance(tmp_path / "data", lock_fd=os.dup(first.lock_fd))
    second.claim()
    assert second.boot != first.boot
    with pytest.raises(Refused, match="served already"):
        Instance(tmp_path / "data").claim()
    second.release()
    with Instance(tmp_path / "data"):
        pass
    first.release()


def test_a_lock_file_that_was_removed_before_it_was_handed_over_is_made_anew(tmp_path: Path) -> None:
    first = Instance(tmp_path / "data")
    first.claim()
    (tmp_path / "data" / "mlxd.lock").unlink()
    with Instance(tmp_path / "data", lock_fd=os.dup(first.lock_fd)) as second:
        assert read_owner(tmp_path / "data" / "mlxd.lock") is not None
        assert second.lock_fd != first.lock_fd
    first.release()


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"listener": 999, "lock": 998}', '{"listener": -1, "lock": -1}', "{}"]
)
def test_what_was_not_handed_over_to_this_process_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(handover.VARIABLE, text)
    assert handover.received() is None
    assert handover.VARIABLE not in os.environ
