"""Serve a model directory with the fake worker: `python -m tests.process.serve_fake SETTINGS_JSON MODEL_DIR`.

Prints the address once it listens. Its exit code and the one line of a refusal are those of `mlxd serve`.
"""

import json
import sys
from pathlib import Path

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.server import serve
from shared import logs
from shared.errors import Refused

COMMAND = [sys.executable, "-P", "-m", "tests.fakes.worker"]
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """As `parent.cli` does it, without the command line."""
    given = json.loads(sys.argv[1])
    given["data_dir"] = Path(given["data_dir"])
    logs.configure("info", json=True)
    model = ModelEntry(id="org/fake-1b", path=Path(sys.argv[2]), aliases=["fake"])
    try:
        return serve(
            Settings(**given),
            [model],
            worker_command=COMMAND,
            worker_env={"PYTHONPATH": str(ROOT)},
            on_listening=lambda url: print(url, flush=True),
        )
    except Refused as refused:
        print(f"mlxd: {refused}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
