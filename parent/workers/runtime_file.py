"""`workers.json` in the runtime folder: the workers that a later parent may adopt. Mode 0600: it holds their nonces."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.control import LaunchModel

NAME = "workers.json"
JOB_SOCKETS = "j*.ctl"
"""What the sockets of jobs beside it are called; who they are stands in the rows of the jobs."""

Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]  # pid_t: what is beyond is no process of any system


class RuntimeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker. `pid` and `start_time` together name its process; numbers alone are given out again."""

    name: str  # of its supervisor; the beginning of its sockets' names
    pid: Pid
    start_time: float
    socket: str
    adopt_socket: str
    nonce: str
    wire: int
    version: str
    launch: LaunchModel
    command: list[str]
    epoch: int
    footprint: int = 0  # bytes
    server: Annotated[int, Meta(ge=0, lt=1 << 31)] = (
        0  # pid of the server that it works for, and when it began
    )
    server_start: float = 0.0


def write(path: Path, records: Sequence[RuntimeRecord]) -> None:
    """Replace the file, whole or not at all. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(records))
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: Path) -> list[RuntimeRecord]:
    """What an earlier parent wrote; nothing where there is nothing that can be read (its workers then leave)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[RuntimeRecord])
    except (OSError, msgspec.MsgspecError):
        return []


def names_all(path: Path, records: Sequence[RuntimeRecord]) -> bool:
    """Whether each of these workers is written there as it is, but for its footprint, which changes all the time."""
    written = [msgspec.structs.replace(record, footprint=0) for record in read(path)]
    return all(msgspec.structs.replace(record, footprint=0) in written for record in records)
