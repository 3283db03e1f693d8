"""What this machine offers to models: its memory, and where mlx would run, without ever loading mlx."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

_CGROUPS = Path("/sys/fs/cgroup")
_CUDA = ("mlx-cuda-13", "mlx-cuda-12")
_BACKENDS = ("mlx-metal", *_CUDA, "mlx-cpu")
_GIB = 1 << 30
SMI_S = 5.0


class Device(msgspec.Struct, frozen=True):
    """Where a model would run. `memory_bytes`: of the card, where it has its own; else of the machine.

    `budget_bytes`: what models may have of it, which `budget_name` explains.
    """

    kind: Literal["cpu", "gpu"]
    memory_bytes: int
    budget_bytes: int
    budget_name: str
    shares_memory: bool = True


def memory_bytes() -> int:
    """Physical memory, or what a container or a service may use of it where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return total
    return min([total, *cgroup_limits(own, _CGROUPS)])


def cgroup_limits(own: str, root: Path) -> list[int]:
    """The memory limits of a process' cgroup and of all above it. `own`: its `/proc/PID/cgroup`."""
    limits = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = Path(path.lstrip("/"))
        # Seen from inside a container the path may be that of the host, and absent; the top is there always.
        for folder in (place, *place.parents):
            try:
                limit = (base / folder / file).read_text().strip()
            except (OSError, ValueError):
                continue
            if limit.isdigit():
                limits.append(int(limit))
    return limits


def find_device(budget_bytes: int = 0) -> Device:
    """The device of this machine; `budget_bytes`: the setting `memory_budget_bytes`, over what the machine allows."""
    device = _machine_device()
    if not budget_bytes:
        return device
    return msgspec.structs.replace(
        device, budget_bytes=budget_bytes, budget_name="the setting memory_budget_bytes"
    )


def _machine_device() -> Device:
    memory = memory_bytes()
    if sys.platform == "darwin":
        return metal(memory, _wired_limit_mb())
    if any(installed(name) for name in _CUDA) and (card := card_bytes(_ask_smi(os.environ))):
        return cuda(card)
    return cpu(memory)


def cpu(memory: int) -> Device:
    """The CPU backend: memory less a reserve for the system, but half of it at least."""
    reserve = max(memory // 10, 2 * _GIB)
    return Device("cpu", memory, max(memory - reserve, memory // 2), "memory, less a reserve for the system")


def metal(memory: int, wired_limit_mb: int) -> Device:
    """Apple silicon: the GPU's working set, as the system sets it or as `iogpu.wired_limit_mb` says."""
    if wired_limit_mb > 0:
        return Device("gpu", memory, min(wired_limit_mb << 20, memory), "memory, by iogpu.wired_limit_mb")
    share = 0.75 if memory > 36 * _GIB else 0.67
    return Device("gpu", memory, int(memory * share), "memory, the working set of the GPU")


def cuda(card: int) -> Device:
    """A card with memory of its own, less what its driver and libraries take."""
    return Device(
        "gpu", card, card - card // 10, "GPU memory, less a reserve for its driver", shares_memory=False
    )


def card_bytes(said: str) -> int:
    """The memory of the first card in nvidia-smi's answer (MiB in lines); 0 without one."""
    first = next(iter(said.split()), "")
    return int(first) << 20 if first.isascii() and first.isdigit() else 0


def visible_card(environ: Mapping[str, str]) -> str | None:
    """The card that CUDA programs see first, as nvidia-smi's `-i` takes it; "" = any, None = they see none."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return ""
    first = chosen.split(",")[0].strip()
    return first if first.isdigit() or first.startswith("GPU-") else None


def _ask_smi(environ: Mapping[str, str]) -> str:
    card = visible_card(environ)
    if card is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return _said_by([*command, "-i", card] if card else command)


def _wired_limit_mb() -> int:
    said = _said_by(["sysctl", "-n", "iogpu.wired_limit_mb"]).strip()
    return int(said) if said.isascii() and said.isdigit() else 0


def _said_by(command: list[str]) -> str:
    """What a program prints; "" where it is not there, fails or hangs."""
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout if child.returncode == 0 else ""


def installed(distribution: str) -> str:
    """The version of an installed distribution; "" when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def mlx_version() -> str:
    """The installed mlx by its metadata, with its back end; "" when there is none."""
    version = installed("mlx")
    backend = next((name for name in _BACKENDS if installed(name)), "")
    return f"{version} ({backend})" if version and backend else version
