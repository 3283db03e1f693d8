"""Facts of this machine that only `doctor` asks for: whether mlx loads, and who owns a port."""

import socket
import subprocess
import sys

from parent.commands.session import child_environment

# In a child: the parent never loads mlx, and a Metal fault would take only the child.
_DEVICE = "import mlx.core as mx; print(mx.default_device())"


def mlx_device() -> tuple[bool, str]:
    """Whether mlx loads, and its default device or what it said."""
    command = [sys.executable, "-P", "-c", _DEVICE]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return False, "mlx does not load within 60 s"
    if child.returncode == 0:
        return True, child.stdout.strip()
    said = child.stderr.strip().splitlines() or [f"the child ended with {child.returncode}"]
    return False, said[-1]


def port_is_free(host: str, port: int) -> bool:
    """Nobody listens there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
