"""Commands that need a server or a terminal: chat, serve, and the guards of rm and import."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from parent.commands.running import find_running
from parent.library.catalog import ModelEntry
from shared.version import VERSION
from tests.parent.models import write_model
from tests.parent.terminals import Terminal

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


@pytest.fixture
def data() -> Path:
    """The data folder that every command of the test sees."""
    return Path(os.environ["MLXD_DATA_DIR"])


@pytest.fixture
def tiny(data: Path) -> Path:
    return write_model(data / "models" / "org" / "tiny", card={"aliases": ["t"], "origin": "a test"})


@pytest.fixture
def server(tiny: Path, data: Path) -> Iterator[str]:
    """A parent with the fake worker that serves `tiny`; its address."""
    (tiny / "fake.json").write_text(json.dumps({"tokens": 6}))
    settings = json.dumps({"data_dir": str(data), "port": 0, "drain_s": 1.0})
    command = [sys.executable, "-m", "tests.process.serve_fake", settings, str(tiny)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    with closing(child.stdout):
        yield child.stdout.readline().strip()
        child.terminate()
        child.wait(timeout=DEADLINE_S)


def mlxd(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parent", *words]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=False
    )


def test_a_model_that_is_served_is_neither_deleted_nor_replaced(
    server: str, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    for words in (["rm", "tiny", "--yes"], ["import", str(file), "--name", "org/tiny", "--yes"]):
        refused = mlxd(*words)
        assert refused.returncode == 1
        assert f"org/tiny is in memory at {server}" in refused.stderr
    assert (tiny / "config.json").exists()


def test_chat_answers_a_question_from_a_pipe_through_the_running_server(server: str) -> None:
    done = mlxd("chat", stdin="hello there\n")
    assert done.returncode == 0
    assert len(done.stdout.split()) == 6
    assert done.stderr == ""


def test_chat_finds_the_model_that_the_running_server_serves_by_its_folder(server: str, tiny: Path) -> None:
    done = mlxd("chat", str(tiny), stdin="hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 6


@pytest.mark.parametrize("words", [[], ["--system", "caf\udce9"]])
def test_text_that_is_not_utf_8_is_asked_and_shown_with_question_marks(server: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parent", "chat", *words],
        input=b"caf\xe9",
        capture_output=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()


def test_names_that_a_terminal_cannot_show_are_shown_with_question_marks(data: Path) -> None:
    write_model(data / "models" / "tiny", card={"aliases": ["caf\u00e9"]})
    done = subprocess.run(
        [sys.executable, "-m", "parent", "ls"],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf?" in done.stdout


def test_chat_says_why_there_is_no_answer(server: str) -> None:
    refused = mlxd("chat", stdin='hello fake:{"refuse":"context_exceeded"}')
    assert refused.returncode == 1
    assert refused.stderr.startswith("mlxd: ")
    cut = mlxd("chat", stdin='hello fake:{"fail_after":2}')
    assert cut.returncode == 1
    assert len(cut.stdout.split()) == 2
    unknown = mlxd("chat", "nobody", stdin="hello")
    assert unknown.returncode == 1
    assert "there is no model 'nobody'" in unknown.stderr


def test_doctor_and_a_second_server_name_the_one_that_runs(server: str, tiny: Path) -> None:
    assert f"runs at {server}" in mlxd("doctor").stdout
    second = mlxd("serve", "tiny", "--port", "0")
    assert second.returncode == 1
    assert server in second.stderr.splitlines()[-1]


def test_at_a_terminal_ctrl_c_stops_the_answer_and_exit_ends_the_chat(server: str) -> None:
    with closing(Terminal("chat")) as terminal:
        terminal.until(r"/exit ends\.[\s\S]*> ")
        terminal.write(b'hello fake:{"tokens":100000,"ms_per_token":20}\n')
        terminal.until(r"\}\s+(\S+ ){3}")
        terminal.write(b"\x03")
        terminal.until(r"\(stopped\)[\s\S]*> ")
        terminal.write(b"and now\n")
        terminal.until(r"now\s+(\S+ ){6}[\s\S]*> ")
        terminal.write(b"/exit\n")
        assert terminal.child.wait(timeout=DEADLINE_S) == 0


def test_at_a_terminal_serve_asks_before_it_fetches_and_takes_no_for_an_answer(data: Path) -> None:
    with closing(Terminal("serve")) as terminal:
        terminal.until(r"There is no model yet\. Fetch the starter.*\[y/N\] ")
        terminal.write(b"n\n")
        terminal.until(r"mlxd: left as it was")
        assert terminal.child.wait(timeout=DEADLINE_S) == 1
    assert not (data / "models").exists()


def test_rm_asks_at_a_terminal(tiny: Path) -> None:
    with closing(Terminal("rm", "tiny")) as terminal:
        terminal.until(r"Delete org/tiny \(12\.8 kB\)\? \[y/N\] ")
        terminal.write(b"y\n")
        terminal.until(r"org/tiny is deleted")
    assert not tiny.exists()


@pytest.mark.slow
def test_serve_without_a_model_and_without_a_terminal_fetches_the_starter_and_answers(
    starter_model: ModelEntry, data: Path
) -> None:
    """First light. (`starter_model` is asked for its skip: it says when the index cannot be reached.)"""
    command = [sys.executable, "-m", "parent", "serve", "--port", "0"]
    log = data.parent / "log.txt"
    with log.open("w") as errors, httpx2.Client(trust_env=False, timeout=DEADLINE_S) as client:
        child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert child.stdout is not None
        try:
            line = child.stdout.readline()
            assert line.startswith("SmolLM2-135M-Instruct at http://127.0.0.1:"), log.read_text()
            url = line.split(" at ")[1].strip()
            question = [{"role": "user", "content": "What is the capital of France?"}]
            asked = {"model": "starter", "messages": question, "temperature": 0, "max_tokens": 20}
            answer = client.post(f"{url}/v1/chat/completions", json=asked)
            assert "Paris" in answer.json()["choices"][0]["message"]["content"]
            engine = client.get(f"{url}/engine").json()
            assert engine["blas"]
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=DEADLINE_S) == 0
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            shutil.rmtree(data)  # half a gigabyte that pytest would keep


@pytest.mark.slow
def test_chat_brings_its_own_server_and_takes_it_away_again(
    starter_model: ModelEntry, data: Path, blas_env: dict[str, str]
) -> None:
    (data / "models").mkdir(parents=True)
    (data / "models" / starter_model.id).symlink_to(starter_model.path)
    done = mlxd("chat", "--temperature", "0", stdin="What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert find_running(data) is None


def test_a_chat_whose_server_does_not_start_says_why(data: Path) -> None:
    (write_model(data / "models" / "bad") / "tokenizer.json").unlink()
    done = mlxd("chat", "bad", stdin="hello")
    assert done.returncode == 1
    assert "the server did not start: cannot serve bad: " in done.stderr.splitlines()[-1]


def test_python_dash_m_parent_is_the_same_command() -> None:
    assert mlxd("version").stdout == f"mlxd {VERSION}\n"
    assert shutil.which("mlxd", path=str(Path(sys.executable).parent)), "the console script is not installed"
