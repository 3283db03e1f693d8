"""A server of one's own for the length of a block: `mlxd serve` as a child on a free port."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import parent
from parent.config import Settings
from shared.errors import ErrorCode, refuse


@contextmanager
def session_server(settings: Settings, model: str, config: str | None = None) -> Iterator[str]:
    """Start a server for `model` ("" = the obvious one); its URL. It leaves when the block ends, or we do.

    `config`: the settings file, where it is not that of the data folder. Raises `Refused` with the child's own
    reason when it does not come up.
    """
    command = [sys.executable, "-P", "-m", "parent", "serve", *([model] if model else [])]
    command += ["--port", "0", "--no-open", "--data-dir", str(settings.data_dir)]
    command += ["--config", str(Path(config).expanduser().absolute())] if config else []
    print("starting a server for this chat", file=sys.stderr)
    # The only writer of this pipe is us: its end of file reaches the server whatever we die of, KILL too. HUP and
    # TERM therefore keep their default action: a handler in Python could come too late, before a read blocks.
    life, ours = os.pipe()
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(
                [*command, "--leave-with-fd", str(life)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                text=True,
                errors="replace",
                pass_fds=(life,),
                start_new_session=True,  # a Ctrl-C that stops an answer must not stop the server
            )
        finally:
            os.close(life)
        assert child.stdout is not None
        try:
            with child.stdout as lines:
                line = lines.readline()
                if not line:
                    child.wait()
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines() or ["it gave no reason"]
                    reason = said[-1].removeprefix("mlxd: ")
                    raise refuse(ErrorCode.ENGINE_UNAVAILABLE, f"the server did not start: {reason}")
                yield line.split(" at ")[-1].strip()
        finally:
            os.close(ours)
            _stop(child)


def child_environment() -> dict[str, str]:
    """Ours, with the checkout on the path where mlxd runs without being installed."""
    root = Path(parent.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        return dict(os.environ)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)  # the second one means now
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()  # its workers see their control channel end
                child.wait()
