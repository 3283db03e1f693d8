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

SOURCE = Path(__file__).with_name("one_row.c")
FLAGS = ["-O3", "-shared", "-fPIC", "-pthread"]
TIMEOUT_S = 60.0

# Runs in a child with the library and the BLAS preloaded, as a worker would have them: every transposition, one
# row and several, strides and beta, against plain sums; small ones whole, and of large ones (several threads) samples.
_CHECK = """
import ctypes, itertools, random
gemm = ctypes.CDLL(None).cblas_sgemm
real, whole = ctypes.c_float, ctypes.c_int
draw = random.Random(7).random
shapes = [(ta, tb, m, 5, 4) for ta, tb, m in itertools.product((111, 112), (111, 112), (1, 3))]
shapes += [(111, 112, m, 601, 131) for m in range(1, 19)]
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
        assert abs(out[i * n + j] - (2.0 * sum(terms) + beta * c[i * n + j])) < 1e-4 * k, (ta, tb, m, n, i, j)
print("right")
"""


def build(blas: str, cache_dir: Path) -> Path | None:
    """The checked library for the BLAS at path `blas`; None where it cannot be had. Quick the second time.

    A refusal is remembered too: an empty file under the name that the library would have.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux" or set(" :\t\n") & set(str(cache_dir)):
        return None  # the loader splits LD_PRELOAD at spaces and colons
    try:
        facts = os.stat(blas)
        key = f"{SOURCE.read_text()}{_CHECK}{blas}{facts.st_size}{facts.st_mtime_ns}"
        library = cache_dir / f"one_row-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            _make(compiler, blas, library)
        return library if library.stat().st_size else None
    except (OSError, subprocess.SubprocessError):
        return None  # no room, no right to write, a compiler that hangs: the BLAS alone will do


def _make(compiler: str, blas: str, library: Path) -> None:
    scratch = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        command = [compiler, *FLAGS, "-o", str(scratch), str(SOURCE), "-ldl"]
        made = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
        if made.returncode or not is_right(scratch, blas):
            scratch.write_bytes(b"")
        scratch.replace(library)
    finally:
        scratch.unlink(missing_ok=True)


def is_right(library: Path, blas: str) -> bool:
    """Whether `library` in front of `blas` computes what it should."""
    environment = {**os.environ, "LD_PRELOAD": f"{library}:{blas}"}
    command = [sys.executable, "-I", "-S", "-c", _CHECK]
    child = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    return child.stdout.strip() == b"right"
