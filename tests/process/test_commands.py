"""The commands that speak to a running server: ps, load, unload, over a real parent and fake workers."""

import subprocess
import sys
from pathlib import Path

from tests.process.harness import ROOT, Served, served


def mlxd(server: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "parent", *words, "--data-dir", str(server.data_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_ps_load_and_unload(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        server.wait_state("ready")
        loaded = mlxd(server, "load", "b")
        assert (loaded.returncode, loaded.stdout) == (0, "b is ready\n")
        shown = mlxd(server, "ps").stdout.splitlines()
        assert shown[0].split() == ["MODEL", "STATE", "MEMORY", "RUNNING", "WAITING", "LEAVES"]
        assert {line.split()[0] for line in shown[1:3]} == {"org/fake-1b", "b"}
        assert shown[3].endswith("free")
        gone = mlxd(server, "unload", "b")
        assert (gone.returncode, gone.stdout) == (0, "b is absent\n")
        assert "b" not in server.running()
        wrong = mlxd(server, "load", "c")
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("mlxd: there is no model 'c'")


def test_without_a_server_they_say_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parent", "ps", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "start one with `mlxd serve`" in done.stderr
