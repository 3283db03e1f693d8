"""Serve model directories with the fake worker: `python -m tests.process.serve_fake SETTINGS_JSON MODEL_DIR...`.

The first model is `org/fake-1b` and the default; the others are called by their folders' names. Prints the address
once it listens. Its exit code and the one line of a refusal are those of `mlxd serve`.
"""

import json
import sys
from pathlib import Path

from parent.library.catalog import read_entry
from parent.library.library import Library
from parent.library.machine import cpu
from parent.live_config import LiveConfig
from parent.server import serve
from shared import logs
from shared.errors import Refused

COMMAND = [sys.executable, "-P", "-m", "tests.fakes.worker"]
ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def main() -> int:
    """As `parent.cli` does it, without the command line."""
    given = {
        name: ", ".join(value) if isinstance(value, list) else str(value)
        for name, value in json.loads(sys.argv[1]).items()
        if value is not None  # left to the settings file
    }
    logs.configure("info", json=True)
    try:
        live = LiveConfig({"hf_cache": "none"} | given, {}, home=Path(given["data_dir"]))
        library = Library(lambda: live.settings, lambda: live.models)
        for number, folder in enumerate(map(Path, sys.argv[2:])):
            library.add(read_entry(folder, folder.name if number else "org/fake-1b"))
        return serve(
            live,
            library,
            default="org/fake-1b",
            device=cpu(64 * GIB),
            worker_command=COMMAND,
            worker_env={"PYTHONPATH": str(ROOT)},
            on_listening=lambda url: print(url, flush=True),
        )
    except Refused as refused:
        print(f"mlxd: {refused}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
