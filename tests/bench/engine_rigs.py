"""What the parts of `tests.bench.engine` run on: a model, the BLAS of its workers, and the peers' environments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

VLLM = "vllm-mlx==0.6.0"
VLLM_NEEDS = [
    "mlx-lm==0.31.3",
    *("fastapi", "uvicorn", "starlette", "psutil", "requests", "pyyaml", "prometheus-client", "jsonschema"),
    *("llguidance", "pytz", "pillow", "tqdm", "tabulate", "mcp"),
]
"""Of what it declares the rest is for images, sound and a page; on Linux that brings a torch for CUDA."""


class Rig(NamedTuple):
    """`environment`: what a worker gets for its BLAS. `python`: our interpreter; `peer`: that of mlx_lm.server.

    `vllm`: the program of vllm-mlx, or why there is none. `plot`: the file to draw into.
    """

    model: Path
    environment: dict[str, str]
    blas: str
    python: str
    peer: Path
    vllm: Path | str
    plot: Path | None


def without_one_row(environment: dict[str, str]) -> dict[str, str]:
    """The same BLAS without our library in front of it."""
    preload = environment.get("LD_PRELOAD", "").split(":")
    return {**environment, "LD_PRELOAD": ":".join(path for path in preload if "/one_row-" not in path)}


def vllm_program(data: Path) -> Path | str:
    """vllm-mlx in an environment of its own, made on first use; in words what went wrong where it did."""
    folder = data / "bench-vllm"
    python, program = folder / "bin" / "python", folder / "bin" / "vllm-mlx"
    if not (folder / "ready").exists():
        mlx = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
        pip = [str(python), "-m", "pip", "install", "-q"]
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, "--no-deps", VLLM],
            [*pip, mlx, *VLLM_NEEDS],
        ):
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=_bare_environment())
            if done.returncode:
                return f"does not install: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        (folder / "ready").write_text(VLLM)
    tried = subprocess.run([str(program), "--help"], capture_output=True, text=True)
    if tried.returncode:
        return f"does not start: {(tried.stderr.strip().splitlines() or ['?'])[-1]}"
    return program


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
