"""The numbers of the engine: `python -m tests.bench.engine [--quick] [--only single,streams,…]`.

    single    decode and prefill of one row beside a bare mlx loop, and decode over HTTP beside mlx_lm.server
    streams   tokens a second of 1 to 16 streams over HTTP, beside mlx_lm.server and vllm-mlx
    fairness  what rows that decode lose to a long prompt, and what that loses to them
    prefix    time to the first token where the prompt begins like one that is kept, in memory and on disk
    growth    what a decode step costs over rows and context, beside the arithmetic; drawn into docs/
    memory    the most bytes in use, beside weights and KV by formula

All on the same weights with the same BLAS, medians of 5 by turns. The model is the starter, fetched where it is not
there; the peers get environments of their own, made on first use. Each line says held or MISSED; the exit code is 1
when one is missed. Compare only numbers of one run.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx2

from parent.config import load_settings
from parent.workers.blas import worker_env
from tests.bench.engine_growth import measure_growth, measure_memory
from tests.bench.engine_prompts import measure_fairness, measure_prefix
from tests.bench.engine_rigs import Rig, vllm_program
from tests.bench.engine_single import measure_single
from tests.bench.engine_streams import measure_streams
from tests.bench.pooled import NoAnswer
from tests.bench.serve import ROOT, machine, peer_python, starter
from tests.bench.verdict import How, Line, table

PARTS: dict[str, Callable[[Rig, Path, How], list[Line]]] = {
    "single": measure_single,
    "streams": measure_streams,
    "fairness": measure_fairness,
    "prefix": measure_prefix,
    "growth": measure_growth,
    "memory": measure_memory,
}
FAULTS = (AssertionError, NoAnswer, OSError, SystemExit, http.client.HTTPException, httpx2.HTTPError)


def main() -> int:
    """Run the parts, print the table and one JSON line. 1 = a bar was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds, for a look")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--no-vllm", action="store_true", help="leave vllm-mlx out")
    parser.add_argument(
        "--plot", type=Path, help="where growth is drawn (docs/engine-growth.svg; --quick: nowhere)"
    )
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in [name for name in os.environ if name.startswith("MLXD_")]:
        del os.environ[name]  # settings of the user do not count
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers too, as Ctrl-C does
    rig = _rig(options, parts)
    lines: list[Line] = []
    for part in parts:
        began = time.monotonic()
        print(f"{part} …", file=sys.stderr, flush=True)
        lines += _run(part, rig, How(options.quick, 8))
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{machine()}; {rig.blas}; model {rig.model.name}{'; quick' if options.quick else ''}\n")
    print(table(lines))
    print(json.dumps([line._asdict() | {"verdict": line.verdict} for line in lines]))
    return int(any(line.is_held is False for line in lines))


def _rig(options: argparse.Namespace, parts: list[str]) -> Rig:
    data = ROOT / ".data"
    environment, blas = worker_env(load_settings({"data_dir": str(data)}, {}, home=ROOT).settings)
    vllm: Path | str = "left out"
    if "streams" in parts and not options.no_vllm:
        vllm = vllm_program(data)
    plot = options.plot or (None if options.quick else ROOT / "docs" / "engine-growth.svg")
    model = starter(data).resolve()
    return Rig(model, environment, blas, sys.executable, peer_python(data), vllm, plot)


def _run(part: str, rig: Rig, how: How) -> list[Line]:
    """One part in a folder of its own; one that breaks off is a line too."""
    with tempfile.TemporaryDirectory(prefix="mlxd-engine-") as folder:
        try:
            return PARTS[part](rig, Path(folder), how)
        except FAULTS as error:
            if isinstance(error, SystemExit) and error.code == 143:
                raise
            return [Line(part, "broke off", f"{type(error).__name__}: {error}"[:200], "none", False)]


if __name__ == "__main__":
    sys.exit(main())
