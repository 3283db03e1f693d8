"""Facts of this machine for `fit` and `doctor`: memory, mlx's version and device, who owns a port."""

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from parent.commands.session import child_environment

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# In a child: the parent never loads mlx, and a Metal fault would take only the child.
_DEVICE = """\
import mlx.core as mx
print(mx.default_device())
print(mx.device_info().get("total_memory", 0) if mx.default_device().type == mx.gpu else 0)
"""


class Device(msgspec.Struct, frozen=True):
    """Where a model would run. `memory_bytes`: of the card, where it has its own; else of the machine."""

    kind: Literal["cpu", "gpu"]
    memory_bytes: int
    shares_memory: bool = True


def memory_bytes() -> int:
    """Physical memory, or what a container may use of it where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        try:
            limit = Path(file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def mlx_version() -> str:
    """The installed mlx by its metadata, with its back end; "" when there is none."""
    try:
        version = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return ""
    for backend in ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu"):
        try:
            importlib.metadata.version(backend)
        except importlib.metadata.PackageNotFoundError:
            continue
        return f"{version} ({backend})"
    return version


def mlx_device() -> tuple[bool, str]:
    """Whether mlx loads, and its default device or what it said."""
    loads, said = _ask_mlx()
    return loads, said[0]


def find_device() -> Device:
    """mlx's default device; where mlx does not load, the one that such a machine should have."""
    loads, said = _ask_mlx()
    gpu = "gpu" in said[0] if loads else sys.platform == "darwin"
    card = int(said[1]) if loads and len(said) > 1 and said[1].isdigit() else 0
    if gpu and card:
        return Device("gpu", card, shares_memory=False)
    return Device("gpu" if gpu else "cpu", memory_bytes())


def _ask_mlx() -> tuple[bool, list[str]]:
    command = [sys.executable, "-P", "-c", _DEVICE]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return False, ["mlx does not load within 60 s"]
    if child.returncode == 0:
        return True, child.stdout.strip().splitlines() or [""]
    said = child.stderr.strip().splitlines() or [f"the child ended with {child.returncode}"]
    return False, said[-1:]


def port_is_free(host: str, port: int) -> bool:
    """Nobody listens there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
