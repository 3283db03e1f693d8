"""`mlxd launch`: what each client is told, seen in a dry run and by a fake client that writes its environment down."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parent.commands.clients import CLIENTS, Asked, Model, small_of
from tests.process.harness import ROOT, Served, served

ID = "org/fake-1b"
FAKE_CLIENT = """#!{python}
import json, os, sys
with open({told!r}, "w") as file:
    json.dump({{"env": dict(os.environ), "argv": sys.argv[1:]}}, file)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scripts = {"small": {}, "cold": {}}
    script = {"measured_bytes": 4096}
    with served(tmp_path_factory.mktemp("launch"), script, scripts) as server:
        for name in (ID, "small", "cold"):
            folder = server.model_dir.parent / ("model" if name == ID else name)
            (folder / "chat_template.jinja").write_text("{{ messages }}{{ tools }}")
        server.wait_state("ready")
        assert server.http.post("/v1/models/small/load", json={"wait": True}).status_code == 200
        yield server


def launch(server: Served, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "parent", "--data-dir", str(server.data_dir), "launch", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def parts(told: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Environment, files and command of a dry run."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    head, _, command = told.rpartition("# command\n")
    for part in head.split("# ")[1:]:
        title, _, text = part.partition("\n")
        if title == "environment":
            env = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        else:
            files[Path(title.removeprefix("file ")).name] = text
    return env, files, command.strip()


def test_launch_claude_dry_run_maps_every_tier(server: Served) -> None:
    done = launch(server, "claude", "--dry-run", "--", "-p", "two words")
    assert done.returncode == 0, done.stderr
    env, files, command = parts(done.stdout)
    assert (env["ANTHROPIC_BASE_URL"], files, command) == (server.url, {}, "claude -p 'two words'")
    assert env["CLAUDE_CONFIG_DIR"] == str(server.data_dir / "launch" / "claude")
    tiers = {name: value for name, value in env.items() if name.endswith("_MODEL")}
    small = {"ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"}
    assert {name for name, value in tiers.items() if value == "small"} == small
    assert {value for name, value in tiers.items() if name not in small} == {ID}
    assert "unset CLAUDE_CODE_USE_BEDROCK" in done.stdout
    assert not (server.data_dir / "launch").exists()


def test_launch_codex_dry_run_has_a_configuration(server: Served) -> None:
    env, files, command = parts(launch(server, "codex", "--dry-run", "--model", "fake").stdout)
    config = tomllib.loads(files["config.toml"])
    assert (config["model"], config["model_provider"], command) == ("fake", "mlxd", "codex")
    assert config["model_context_window"] == 4096
    provider = config["model_providers"]["mlxd"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{server.url}/v1", "responses")
    assert provider["env_key"] == "CODEX_LOCAL_KEY"
    assert env == {"CODEX_HOME": str(server.data_dir / "launch" / "codex"), "CODEX_LOCAL_KEY": "mlxd"}


def test_launch_opencode_dry_run_has_a_provider(server: Served) -> None:
    env, _, command = parts(launch(server, "opencode", "--dry-run", "--small-model", "cold").stdout)
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["small_model"], command) == (f"mlxd/{ID}", "mlxd/cold", "opencode")
    provider = config["provider"]["mlxd"]
    assert provider["options"]["baseURL"] == f"{server.url}/v1"
    assert set(provider["models"]) == {ID, "cold"}
    assert provider["models"][ID]["limit"]["context"] == 4096


@pytest.mark.parametrize("name", list(CLIENTS))
def test_launch_starts_the_client_and_passes_its_exit_code_on(
    server: Served, tmp_path: Path, name: str
) -> None:
    told = tmp_path / "told.json"
    program = tmp_path / name
    program.write_text(FAKE_CLIENT.format(python=sys.executable, told=str(told)))
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    done = launch(
        server,
        name,
        "--",
        "--help",
        "x",
        PATH=str(tmp_path),
        HOME=str(home),
        CLAUDE_CODE_USE_BEDROCK="1",
        KEPT="yes",
    )
    assert done.returncode == 7, done.stderr
    seen: dict[str, Any] = json.loads(told.read_text())
    assert seen["argv"] == ["--help", "x"]
    assert seen["env"]["KEPT"] == "yes"
    assert list(home.iterdir()) == []
    if name == "claude":
        assert "CLAUDE_CODE_USE_BEDROCK" not in seen["env"]
    if name == "codex":
        assert (Path(seen["env"]["CODEX_HOME"]) / "config.toml").exists()


def test_launch_of_what_is_not_installed_says_how_to_install_it(server: Served, tmp_path: Path) -> None:
    done = launch(server, "codex", PATH=str(tmp_path), HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mlxd: codex is not installed; `npm install -g @openai/codex` installs it\n"


def test_launch_of_an_unknown_model_or_client_is_one_line(server: Served) -> None:
    unknown = launch(server, "claude", "--dry-run", "--model", "nobody")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "nobody" in unknown.stderr
    assert launch(server, "emacs").returncode == 2


def test_launch_without_a_server_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parent", "launch", "claude", "--data-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "mlxd serve" in done.stderr


MAIN = Model("main", 8, ["chat"], 100, True)


@pytest.mark.parametrize(
    ("others", "small"),
    [
        ([], "main"),
        ([Model("a", 8, ["chat"], 10, True), Model("b", 8, ["chat"], 5, True)], "b"),
        ([Model("cold", 8, ["chat"], 10, False)], "main"),
        ([Model("reader", 8, ["embeddings"], 10, True)], "main"),
        ([Model("bigger", 8, ["chat"], 1000, True)], "main"),
    ],
)
def test_launch_takes_a_small_model_only_from_memory(others: list[Model], small: str) -> None:
    assert small_of([MAIN, *others], MAIN).id == small


@pytest.mark.parametrize("name", list(CLIENTS))
def test_launch_plans_hold_any_name_of_a_model(name: str) -> None:
    odd = Model('a "b"\\c\n東京', 8, ["chat"], 1, True)
    plan = CLIENTS[name].plan(Asked("http://h:1", odd, odd, "/f"))
    told = {
        "claude": lambda: plan.env["ANTHROPIC_MODEL"],
        "codex": lambda: tomllib.loads(plan.files["config.toml"])["model"],
        "opencode": lambda: json.loads(plan.env["OPENCODE_CONFIG_CONTENT"])["model"].removeprefix("mlxd/"),
    }
    assert told[name]() == odd.id
