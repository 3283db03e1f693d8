"""A small library in front of the BLAS that does the products of decode steps: one row, or a few.

The common BLAS libraries are slow at them through `cblas_sgemm`, because they pack the whole matrix for a few rows (a
factor of 1.5 to 2 with OpenBLAS 0.3.21, see docs/benchmarks.md). `one_row.c` is compiled once, with the C compiler of
the machine if there is one; a child checks it against sums written out before it is ever used.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

SOURCE = Path(__file__).with_name("one_row.c")
FLAGS = ["-O3", "-shared", "-fPIC", "-pthread"]
TIMEOUT_S = 60.0
WRONG = "wrong"
_DIGEST = 32  # bytes behind a library, which the loader does not look at

# Runs in a child with the library and the BLAS preloaded, as a worker would have them: every transposition, one
# row and several, strides and beta, against plain sums; small ones whole, and of large ones (several threads) samples.
_CHECK = """
import ctypes, itertools, random, sys
if sys.argv[1] not in open("/proc/self/maps").read():
    sys.exit("the loader does not take it")  # which it says nowhere else, and goes on without it
gemm = ctypes.CDLL(None).cblas_sgemm
real, whole = ctypes.c_float, ctypes.c_int
draw = random.Random(7).random
shapes = [(ta, tb, m, 5, 4) for ta, tb, m in itertools.product((111, 112), (111, 112), (1, 3))]
shapes += [(111, 112, m, 601, 131) for m in range(1, 19)]
shapes += [(111, tb, m, n, 33) for tb, m, n in itertools.product((111, 112), (1, 2, 3, 4, 5, 16), (8, 40, 520))]
for (ta, tb, m, n, k), beta in itertools.product(shapes, (0.0, 0.5)):
    pad = 2
    lda = (k if ta == 111 else m) + pad
    ldb = (n if tb == 111 else k) + pad
    a = [draw() for _ in range((m if ta == 111 else k) * lda)]
    b = [draw() for _ in range((k if tb == 111 else n) * ldb)]
    c = [draw() for _ in range(m * n)]
    out = (real * len(c))(*c)
    gemm(101, ta, tb, m, n, k, real(2.0), (real * len(a))(*a), lda, (real * len(b))(*b), ldb, real(beta), out, n)
    for i, j in itertools.product(range(m), {*range(0, n, 1 + n // 20), n - 1}):
        terms = ((a[i * lda + x] if ta == 111 else a[x * lda + i]) * (b[x * ldb + j] if tb == 111 else b[j * ldb + x])
                 for x in range(k))
        if not abs(out[i * n + j] - (2.0 * sum(terms) + beta * c[i * n + j])) < 1e-4 * k:
            sys.exit("wrong")
print("right")
"""


class Front(msgspec.Struct, frozen=True):
    """The checked library, or None and in a line why it cannot be had. `is_new`: it was not there before."""

    path: Path | None
    reason: str = ""
    is_new: bool = False


def build(blas: str, cache_dir: Path) -> Front:
    """The library for the BLAS at path `blas`. Quick the second time.

    That it computes wrongly is remembered, in a file of that name; whatever else went wrong is tried again next time.
    """
    if sys.platform != "linux":
        return Front(None, "it is for Linux only")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Front(None, "there is no C compiler; install gcc")
    if set(" :\t\n") & set(str(cache_dir)):  # the loader splits LD_PRELOAD there
        return Front(None, f"the path {cache_dir} has a space or a colon in it; choose another data folder")
    try:
        facts = os.stat(blas)
        key = f"{SOURCE.read_text()}{_CHECK}{blas}{facts.st_size}{facts.st_mtime_ns}"
        library = cache_dir / f"one_row-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if is_whole(library):
            return Front(library)
        refusal = library.with_suffix(".wrong")
        if not refusal.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            fault = _make(compiler, blas, library)
            if fault != WRONG:
                return Front(None, fault) if fault else Front(library, is_new=True)
            refusal.touch()
        return Front(None, f"it computes wrongly here; to try it again, remove {refusal}")
    except OSError as error:
        return Front(None, f"{error.filename or cache_dir}: {error.strerror or error}")


def is_whole(library: Path) -> bool:
    """Whether the file is there as it was written: its last bytes are a digest of the others."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_DIGEST:] == hashlib.sha256(content[:-_DIGEST]).digest()


def _make(compiler: str, blas: str, library: Path) -> str:
    """Write the library, whole or not at all; why not, in a line."""
    scratch = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        command = [compiler, *FLAGS, "-o", str(scratch), str(SOURCE), "-ldl"]
        if fault := _compiled(command) or check(scratch, blas):
            return fault
        with open(scratch, "r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(library)
    finally:
        scratch.unlink(missing_ok=True)
    return ""


def _compiled(command: list[str]) -> str:
    try:
        made = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {TIMEOUT_S:g} s"
    if not made.returncode:
        return ""
    said = made.stderr.decode("utf-8", "replace").strip().splitlines()
    told = next((line for line in said if "rror" in line), said[0] if said else "it says nothing")
    return f"{command[0]} ended with {made.returncode}: {told}"


def check(library: Path, blas: str) -> str:
    """What is amiss with `library` in front of `blas`: "" = nothing, `WRONG` = it computes something else."""
    environment = {**os.environ, "LD_PRELOAD": f"{library}:{blas}"}
    mapped = os.path.realpath(library)  # the kernel names what it maps without links
    command = [sys.executable, "-I", "-S", "-c", _CHECK, mapped]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its check did not end within {TIMEOUT_S:g} s"
    said = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it says nothing"]
    if child.returncode == 0 and child.stdout.strip() == b"right":
        return ""
    return WRONG if said[0] == WRONG else f"its check ended with {child.returncode}: {said[0]}"
