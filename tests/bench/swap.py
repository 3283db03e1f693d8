"""The numbers of supervision: `python -m tests.bench.swap [--quick] [--only swap,alternate,race,kill,adopt]`.

    swap        A to B to A with room for one, beside stop and cold start of the bare worker in the same run; what
                going back and forth costs in the parent with room for two
    alternate   two clients on two models with room for one: swaps a request, the longest wait and its bound
    race        8 models and 16 clients on memory for 2: the ledger, looked at all along
    kill        kill -9 of the worker at random moments under 16 streams: every text is that of an undisturbed run
    adopt       kill -9 of the parent, and `POST /admin/restart` under load: workers are adopted, nothing is lost

The real model is the starter, fetched where it is not there. Each line says held or MISSED; the exit code is 1
when one is missed. Compare only numbers of one run.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from tests.bench.pooled import NoAnswer
from tests.bench.serve import ROOT, machine, starter
from tests.bench.swap_cost import measure_swap
from tests.bench.swap_deaths import measure_kill
from tests.bench.swap_parents import measure_adopt
from tests.bench.swap_queue import measure_alternate, measure_race
from tests.bench.verdict import How, Line, table

PARTS: dict[str, Callable[[Path, Path, How], list[Line]]] = {
    "swap": measure_swap,
    "alternate": measure_alternate,
    "race": measure_race,
    "kill": measure_kill,
    "adopt": measure_adopt,
}
FAULTS = (AssertionError, NoAnswer, OSError, http.client.HTTPException, httpx2.HTTPError)


def main() -> int:
    """Run the parts, print the table and one JSON line. 1 = a bar was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument(
        "--rows", type=int, default=8, help="kill: streams at a time in the real worker (16: twice as long)"
    )
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    _start_clean()
    model = starter(ROOT / ".data").resolve()
    lines: list[Line] = []
    for part in parts:
        began = time.monotonic()
        print(f"{part} …", file=sys.stderr, flush=True)
        lines += _run(part, model, How(options.quick, options.rows))
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{machine()}; model {model.name}{'; quick' if options.quick else ''}\n")
    print(table(lines))
    print(json.dumps([_as_json(line) for line in lines]))
    return int(any(line.is_held is False for line in lines))


def _run(part: str, model: Path, how: How) -> list[Line]:
    """One part in a folder of its own; one that breaks off is a line too."""
    with tempfile.TemporaryDirectory(prefix="mlxd-swap-") as folder, contextlib.ExitStack() as stack:
        try:
            return PARTS[part](model, Path(folder), how)
        except FAULTS as error:
            stack.callback(_show_log, Path(folder))
            return [Line(part, "broke off", f"{type(error).__name__}: {error}"[:200], "none", False)]


def _show_log(folder: Path) -> None:
    for log in folder.rglob("stderr"):
        print(f"{log}:", *log.read_text().splitlines()[-15:], sep="\n", file=sys.stderr)


def _start_clean() -> None:
    """Settings of the user do not count, and SIGTERM ends the servers too, as Ctrl-C does."""
    for name in [name for name in os.environ if name.startswith("MLXD_")]:
        del os.environ[name]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _as_json(line: Line) -> dict[str, Any]:
    return line._asdict() | {"verdict": line.verdict}


if __name__ == "__main__":
    sys.exit(main())
