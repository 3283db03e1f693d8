"""What this process has held of the memory at most."""

import re
import resource
import sys
from pathlib import Path

_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_bytes() -> int:
    """Resident bytes. On Linux not those of `getrusage`, which begin with what the parent held at the fork."""
    if sys.platform == "linux":
        try:
            found = _HIGH_WATER.search(Path("/proc/self/status").read_text())
        except OSError:
            found = None
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
