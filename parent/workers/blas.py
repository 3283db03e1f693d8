"""Which BLAS a worker on the Linux CPU gets, and the environment that gives it.

mlx's Linux CPU wheel brings the reference BLAS, 2 to 40 times slower than OpenBLAS. A better library placed
in `LD_PRELOAD` takes its `cblas_*` calls over. It goes into the worker's environment only, and the parent
never loads it: a small child tries each candidate, and the answer is kept in a file.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from parent.config import Settings
from parent.workers import one_row
from shared.errors import ErrorCode, refuse

# In the order of preference: threads of its own beat OpenMP (no clash with another runtime), both beat the
# generic soname, which may be a serial build. `{machine}` is platform.machine().
_PLACES = [
    "/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",  # Debian, Ubuntu
    "/usr/lib64/libopenblasp.so.0",  # Fedora, RHEL
    "/usr/lib64/openblas-pthreads/libopenblas.so.0",  # openSUSE
    "/usr/lib/{machine}-linux-gnu/openblas-openmp/libopenblas.so.0",
    "/usr/lib64/libopenblaso.so.0",
    "/usr/lib64/openblas-openmp/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",  # Arch, Alpine (`libcblas` is part of it)
    "/usr/lib/libopenblas.so.3",
    "/usr/lib/{machine}-linux-gnu/blis-pthread/libblis.so.4",
    "/usr/lib64/libblis.so.4",
]
_SONAME = re.compile(r"\b(libopenblasp?o?|libblis|libmkl_rt)\.so(\.\d+)*\b")

# Runs in a child: does the library load, and does it export the name that mlx calls, without a suffix?
_PROBE = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.cblas_sgemm
try:
    library.openblas_get_config.restype = ctypes.c_char_p
    about = library.openblas_get_config().decode()
except AttributeError:
    about = ""
print(json.dumps(about))
"""


class Blas(msgspec.Struct, frozen=True):
    """The choice for this machine: `path` to preload ("" = nothing) and a line for `/engine` and `doctor`."""

    path: str
    description: str
    advice: str = ""  # what to do for a better one; "" = nothing to do


class Probe(msgspec.Struct, frozen=True):
    """What the child found out about one file, as it was then."""

    size: int
    mtime_ns: int
    usable: bool
    about: str  # OpenBLAS's own line, or why it cannot be used


def worker_env(settings: Settings) -> tuple[dict[str, str], str]:
    """Variables to add to a worker's environment, and one line that describes the BLAS.

    The worker cannot see what was put in front of it, so it is told (`MLXD_BLAS_NAME`) and says so in its
    facts. Raises `Refused` when `blas` names a file that cannot serve as one.
    """
    chosen = choose(settings)
    line = f"{chosen.description}; {chosen.advice}" if chosen.advice else chosen.description
    preload = [chosen.path, os.environ.get("LD_PRELOAD", "")]
    if chosen.path:
        front = one_row.build(chosen.path, settings.data_dir / "cache")
        if front.path is not None:
            preload.insert(0, str(front.path))
            line += ", products of up to 16 rows by our kernel"
        else:
            line += f", without our kernel for products of few rows: {front.reason}"
    env = {"MLXD_BLAS_NAME": line}
    if chosen.path:
        env["LD_PRELOAD"] = ":".join(filter(None, preload))
    return env, line


def choose(settings: Settings) -> Blas:
    """The best BLAS for a worker here. Raises `Refused` for a `blas` setting that cannot be had."""
    if sys.platform == "darwin":
        return Blas("", "Accelerate (macOS)")
    if settings.blas == "none":
        return Blas("", "the one mlx brings (setting blas = none)", "set blas = auto for a faster one")
    cache_file = settings.data_dir / "cache" / "blas.json"
    if settings.blas != "auto":
        found = probe(Path(settings.blas), cache_file)
        if not found.usable:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"setting blas: {settings.blas}: {found.about}", param="blas"
            )
        return Blas(settings.blas, _describe(settings.blas, found.about))
    if not _is_cpu_build():
        return Blas("", "not needed (mlx for CUDA)")
    for path in candidates(platform.machine()):
        found = probe(path, cache_file)
        if found.usable:
            return Blas(str(path), _describe(str(path), found.about))
    return Blas(
        "", "reference BLAS that mlx brings (slow)", f"{install_hint()} makes answers 2 to 40 times faster"
    )


def candidates(machine: str) -> Iterator[Path]:
    """Libraries that exist, best first: the known places, then what the loader's cache knows."""
    seen: set[Path] = set()
    for path in (*(Path(place.format(machine=machine)) for place in _PLACES), *_from_loader_cache()):
        if path.is_file() and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def parse_loader_cache(listing: str) -> Iterator[Path]:
    """Paths of BLAS libraries in the output of `ldconfig -p`."""
    for line in listing.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and _SONAME.match(name):
            yield Path(path)


def _from_loader_cache() -> Iterable[Path]:
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return []
    listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False)
    return parse_loader_cache(listing.stdout)


def probe(path: Path, cache_file: Path) -> Probe:
    """What a child says of the library at `path`; the answer is reused while the file stays as it is."""
    try:
        facts = path.stat()
    except OSError as error:
        return Probe(0, 0, False, f"cannot be read: {error.strerror}")
    known = _read_cache(cache_file)
    kept = known.get(str(path))
    if kept and (kept.size, kept.mtime_ns) == (facts.st_size, facts.st_mtime_ns):
        return kept
    usable, about = _try_in_a_child(path)
    found = Probe(facts.st_size, facts.st_mtime_ns, usable, about)
    _write_cache(cache_file, {**known, str(path): found})
    return found


def _try_in_a_child(path: Path) -> tuple[bool, str]:
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(path)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False, "does not load within 20 s"
    if child.returncode == 0:
        return True, str(json.loads(child.stdout.strip().splitlines()[-1]))
    last = child.stderr.strip().splitlines()[-1:] or [f"the probe ended with {child.returncode}"]
    if "AttributeError" in last[0]:
        return False, "exports no cblas_sgemm under its plain name"
    return False, last[0].removeprefix("OSError: ")


def _read_cache(file: Path) -> dict[str, Probe]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Probe])
    except (OSError, msgspec.MsgspecError):
        return {}  # absent or damaged: probe again


def _write_cache(file: Path, known: dict[str, Probe]) -> None:
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(msgspec.json.encode(known))
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)  # a read-only data folder costs a probe at each start, no more


def _is_cpu_build() -> bool:
    """True unless an mlx wheel for CUDA is installed."""
    for name in ("mlx-cuda-12", "mlx-cuda-13"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return False
    return True


def _describe(path: str, about: str) -> str:
    """`OpenBLAS 0.3.21 DYNAMIC_ARCH Haswell (path)`"""
    words = [word for word in about.split() if "=" not in word and not word.startswith("NO_")]
    return f"{' '.join(words)} ({path})" if words else path


def install_hint() -> str:
    """How this system gets a good BLAS."""
    for tool, command in (
        ("apt-get", "sudo apt-get install libopenblas0-pthread"),
        ("dnf", "sudo dnf install openblas-threads"),
        ("zypper", "sudo zypper install libopenblas_pthreads0"),
        ("pacman", "sudo pacman -S openblas"),
        ("apk", "sudo apk add openblas"),
    ):
        if shutil.which(tool):
            return f"`{command}`"
    return "an OpenBLAS from your package manager"
