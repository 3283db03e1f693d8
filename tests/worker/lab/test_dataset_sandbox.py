"""Code for data sets is run where it can do no harm: each wall is tried, and so is each way to end."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shared.errors import Refused
from tests.process.harness import is_running, until
from tests.worker.lab.building import drops_of, made, rows_of
from worker.lab import sandbox
from worker.lab.confined import filter_of
from worker.lab.dataset.verified_code import parted

pytestmark = pytest.mark.skipif(bool(sandbox.missing()), reason=f"no sandbox here: {sandbox.missing()}")


@pytest.fixture(scope="module", autouse=True)
def _walls() -> None:
    sandbox.require()


@pytest.mark.parametrize(
    "code",
    [
        "print('hi')",
        "import asyncio, json, math, re, itertools, collections, dataclasses, decimal, datetime, random",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x')",
        "open('made here', 'w').write('x'); import os; os.mkdir('d'); os.remove('made here')",
        "from concurrent.futures import ThreadPoolExecutor as T; assert list(T(2).map(abs, [-1])) == [1]",
    ],
)
def test_dataset_code_that_harms_nobody_runs_to_its_end(code: str) -> None:
    assert sandbox.run(code).problem == ""


HARMFUL = {
    "the network": "import socket; socket.socket().connect(('127.0.0.1', 80))",
    "the network by name": "import urllib.request as u; u.urlopen('http://example.com', timeout=2)",
    "a listening socket": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "a socket of the system": "import socket; socket.socket(socket.AF_UNIX).connect('/run/x')",
    "fork": "import os; os.fork()",
    "a program": "import subprocess; subprocess.run(['/bin/true'])",
    "a process pool": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "a session of its own": "import os; os.setsid()",
    "reading the user's files": "open('/etc/passwd').read()",
    "listing folders": "import os; os.listdir('/')",
    "our own code": f"open({str(Path(sandbox.__file__))!r}).read()",
    "memory of others": "open('/proc/1/mem', 'rb').read(1)",
    "killing": "import os; os.kill(os.getppid(), 9)",
    "limits of others": "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "raising its own limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "rights": "import os; open('f', 'w').close(); os.chmod('f', 0o777)",
    "links out": "import os; os.symlink('/etc/passwd', 'p'); open('p').read()",
    "a longer life": "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "too large a file": "open('f', 'wb').write(bytes(17 << 20))",
    "too many files": "fs = [open(str(n), 'w') for n in range(100)]",
}


@pytest.mark.parametrize("code", HARMFUL.values(), ids=HARMFUL.keys())
def test_dataset_code_is_held_back(code: str) -> None:
    outcome = sandbox.run(code)
    assert outcome.problem
    assert "timed out" not in outcome.problem


def test_dataset_code_cannot_write_elsewhere(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    for code in (
        f"open({str(target)!r}, 'w').write('x')",
        f"import os; os.remove({str(target)!r})",
        f"import os; os.truncate({str(target)!r}, 0)",
        f"import os; os.rename({str(target)!r}, 'here')",
        f"import os; os.link({str(target)!r}, 'here')",
        f"import os; os.chmod({str(target)!r}, 0)",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
    ):
        assert "Error" in sandbox.run(code).problem
    assert target.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "left early with exit code 0"),
        ("import os; os._exit(0)", "left early with exit code 0"),
        ("print('x' * 99); raise SystemExit(3)", "left early with exit code 3"),
        ("x = [0] * 10 ** 10", "MemoryError"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
    ],
)
def test_dataset_code_that_fails_says_how(code: str, problem: str) -> None:
    assert sandbox.run(code).problem == problem


def test_dataset_code_that_does_not_end_is_ended() -> None:
    assert sandbox.run("while True: pass", timeout_s=0.5).problem == "timed out after 0.5 s"
    assert sandbox.run("import time; time.sleep(99)", timeout_s=0.5).problem == "timed out after 0.5 s"
    stubborn = "import signal, time\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    assert sandbox.run(f"{stubborn}time.sleep(99)", timeout_s=0.5).problem == "timed out after 0.5 s"


def test_dataset_code_that_fills_the_disk_is_ended() -> None:
    code = "n = 0\nwhile True:\n  open(str(n), 'wb').write(bytes(8 << 20)); n += 1"
    assert sandbox.run(code, timeout_s=30).problem == "wrote more than 64 MiB"


def test_dataset_code_does_not_outlive_who_runs_it() -> None:
    """The one who waits is killed in the middle: what runs inside is gone with it."""
    script = (
        "import threading, time\nfrom pathlib import Path\nfrom worker.lab import sandbox\n"
        "code = 'import os, time\\nprint(os.getpid(), flush=True)\\ntime.sleep(99)'\n"
        "threading.Thread(target=sandbox.run, args=(code,), kwargs={'timeout_s': 60}).start()\n"
        "while True:\n"
        "    for file in Path(sandbox.tempfile.gettempdir()).glob('mlxd-sandbox-*/out.txt'):\n"
        "        if text := file.read_text():\n"
        "            print(text, end='', flush=True)\n"
        "            time.sleep(99)\n"
        "    time.sleep(0.01)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        runner = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(sandbox.__file__).parents[2],
            env={**os.environ, "TMPDIR": folder, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])},
        )
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        assert is_running(pid)
        runner.kill()
        runner.wait()
        runner.stdout.close()
        until(lambda: not is_running(pid), "nothing left behind")


def test_nothing_of_dataset_code_is_left() -> None:
    code = "import os\nopen('mine', 'w').close()\nprint(os.getcwd(), os.getpid())"
    folder, pid = sandbox.run(code).output.split()
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), signal.SIGCONT)


def test_nothing_of_our_environment_reaches_dataset_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    said = sandbox.run("import os, sys; print(sorted(os.environ), sys.path)").output
    assert "HF_TOKEN" not in said
    assert "/somewhere" not in said
    assert "site-packages" not in said


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_dataset_filter_is_a_program_that_ends(machine: str) -> None:
    steps = filter_of(machine)
    assert len(steps) < 4096
    for place, (_, jump_true, jump_false, _) in enumerate(steps):
        assert place + 1 + max(jump_true, jump_false) <= len(steps)
    assert steps[-1][0] == 0x06


@pytest.mark.parametrize("platform", ["win32", "freebsd14"])
def test_dataset_code_is_not_run_where_nothing_holds_it_back(platform: str) -> None:
    assert platform in sandbox.missing(platform)


def test_the_profile_of_dataset_code_on_a_mac_closes_the_network(tmp_path: Path) -> None:
    text = sandbox.profile(tmp_path)
    assert text.startswith("(version 1)\n(deny default)\n")
    assert "(deny network*)" in text
    assert "(deny process-fork)" in text
    assert f'(allow file-write* (subpath "{os.path.realpath(tmp_path)}")' in text


def test_the_walls_of_dataset_code_stand_without_our_package(tmp_path: Path) -> None:
    script = Path(sandbox.__file__).with_name("confined.py")
    said = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--missing"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (said.returncode, said.stdout.strip()) == (0, "")


# ---------------------------------------------------------------- the template

FUNCTION = "```python\ndef double(x):\n    return 2 * x\n```"
GOOD = f"{FUNCTION}\n\n```python\nassert double(2) == 4\nassert double(0) == 0\n```"


def test_a_dataset_of_code_says_which_rows_were_verified() -> None:
    answers = {
        "double": GOOD,
        "wrong": GOOD.replace("2 * x", "3 * x"),
        "broken": GOOD.replace("return", "retur n"),
        "sly": GOOD.replace("def double", "import sys\nsys.exit(0)\ndef double"),
        "none": "I would rather not.",
        "untested": FUNCTION,
        "beside": GOOD.replace("double(", "abs(").replace("def abs(", "def double("),
        "inline": "```\ndef double(x):\n    return 2 * x\n\nassert double(1) == 2\n```",
    }
    found, _, _ = made(
        "verified_code", {"specs": "\n".join(answers)}, lambda messages: answers[messages[-1]["content"]]
    )
    rows = {row["messages"][0]["content"]: row for row in rows_of(found)}
    assert {name: row["metadata"]["verified"] for name, row in rows.items()} == {
        "double": True,
        "wrong": False,
        "broken": False,
        "sly": False,
        "inline": True,
    }
    assert rows["double"]["messages"][1]["content"] == "```python\ndef double(x):\n    return 2 * x\n```"
    assert rows["double"]["metadata"]["tests"] == "assert double(2) == 4\nassert double(0) == 0"
    assert "assert" not in rows["inline"]["messages"][1]["content"]
    assert rows["wrong"]["metadata"]["problem"] == "AssertionError"
    assert rows["broken"]["metadata"]["problem"] == "SyntaxError"
    assert dict(drops_of(found)) == {
        "line 5": "the model wrote no code block",
        "line 6": "the model wrote no assertion about its code",
        "line 7": "the model wrote no assertion about its code",
    }


def test_dataset_tests_may_import_and_prepare() -> None:
    code, tests, problem = parted(
        [
            "def f(x):\n    return x",
            "import math\nxs = [1]\nprint('no')\nassert f(xs) == [1]\nassert f(math.pi)",
        ]
    )
    assert (code, problem) == ("def f(x):\n    return x", "")
    assert tests == "import math\nxs = [1]\nassert f(xs) == [1]\nassert f(math.pi)"


def test_a_platform_without_a_dataset_sandbox_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="there is none here: this is a test; use another template"):
        sandbox.require(lambda: "this is a test")
