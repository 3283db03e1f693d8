"""What is written is true: commands, settings, routes, errors, tables and versions, against the code."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parent.cli import VERBS, build_parser
from parent.config import Settings, fields, load_settings
from parent.protocols.base import STATUS
from shared.errors import RETRYABLE, ErrorCode
from shared.version import VERSION
from tests import docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "deploy/*.md", "worker/**/*.md", "parent/**/*.md")
    for file in ROOT.glob(pattern)
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_lines(text: str) -> Iterator[str]:
    """Every line of shell in fenced blocks, and every inline code."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        yield from (line.split("#")[0].strip() for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    for line in code_lines(page.read_text(encoding="utf-8")):
        if found := re.match(r"make ([a-z]+)", line):
            assert found[1] in targets, f"`{line}`: there is no such target"
        if (
            (found := re.match(r"mlxd (\S+)(.*)", line))
            and found[1] != "COMMAND"
            and not found[1].startswith("-")
        ):
            assert found[1] in VERBS, f"`{line}`: there is no such command"
            _, parser = build_parser(found[1])
            assert parser is not None
            for flag in re.findall(r"(?<!\S)--[a-z-]+", found[2]):
                assert flag in {*parser.flags()}, f"`{line}`: no flag {flag}"
        if found := re.match(r"(?:\.venv/bin/)?python -m (tests\.[a-z_.]+)", line):
            path = ROOT / Path(*found[1].split("."))
            assert path.with_suffix(".py").exists(), f"`{line}`: there is no such module"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"a link to {target}"
    for path in re.findall(r"`((?:parent|worker|shared|tests|deploy|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"`{path}` is named and does not exist"


def test_every_command_is_documented() -> None:
    shown = read("README.md") + read("deploy/README.md")
    missing = [verb for verb in VERBS if f"mlxd {verb}" not in shown and verb not in read("CHANGELOG.md")]
    assert missing == []


def test_generated_parts_are_up_to_date() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert text == docs.updated(text), f"{page.name} is out of date; run `make docs`"


def test_the_settings_page_names_every_setting_with_its_default() -> None:
    page = read("docs/settings.md")
    for name, known in fields().items():
        row = next((line for line in page.splitlines() if line.startswith(f"| `{name}` |")), "")
        for word in (known.flag, known.variable, docs.toml_value(known), known.description):
            assert word in row, f"the row of {name} lacks {word}"


def test_the_state_tables_are_what_the_modules_print() -> None:
    page = read("docs/architecture.md")
    for module in ("parent.workers.states", "parent.jobs.states", "parent.inference.states"):
        printed = subprocess.run(
            [sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        assert printed.count("\n") > 5
        assert printed in page, f"the table of {module} is out of date; run `make docs`"


def test_the_example_file_holds_every_setting_at_its_default(tmp_path: Path) -> None:
    text = read("deploy/config.example.toml")
    assert text == docs.example_toml(), "out of date; run `make docs`"
    assert tomllib.loads(text) == {}
    file = tmp_path / "mlxd.toml"
    file.write_text(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert set(tomllib.loads(file.read_text())) == set(fields()) - {"data_dir"}
    resolved = load_settings({"data_dir": str(tmp_path)}, {}, home=tmp_path)
    assert resolved.settings == Settings(data_dir=tmp_path)
    assert {resolved.origins[name] for name in fields() if name != "data_dir"} == {str(file)}


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route in `parent/app.py`, those of the protocols from their table."""
    from parent.protocols import PROTOCOLS

    found = [("POST", protocol.path) for protocol in PROTOCOLS]
    for node in ast.walk(ast.parse(read("parent/app.py"))):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            method, path, _ = node.elts
            if isinstance(method, ast.Constant) and isinstance(path, ast.Constant):
                found.append((str(method.value), re.sub(r":path\}", "}", str(path.value))))
    return found


def test_every_route_is_documented_and_no_other() -> None:
    listed = set(
        re.findall(r"^\| `(GET|POST|PUT|PATCH|DELETE) (\S+)` \|", read("docs/http.md"), re.MULTILINE)
    )
    assert len(routes()) > 5
    assert listed == set(routes())


def test_every_error_code_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)`( ★)? \| (\d{3}) \|", read("docs/http.md"), re.MULTILINE)
    listed = {code: (int(status), bool(star)) for code, star, status in rows}
    assert listed == {code.value: (STATUS[code], code in RETRYABLE) for code in ErrorCode}


def request_fields() -> set[str]:
    """Fields of the bodies that are more than a neutral value."""
    from parent.protocols.openai.chat import ChatBody
    from parent.protocols.openai.completions import TextBody
    from parent.protocols.openai.fields import NEUTRAL

    bodies: tuple[Any, ...] = (ChatBody, TextBody)
    return {field.name for body in bodies for field in msgspec.structs.fields(body)} - set(NEUTRAL)


def test_every_request_field_is_documented() -> None:
    listed = {
        name.split(".")[0]
        for name in re.findall(r"^\| `([\w.]+)` \|(?: ●)? \|(?: ●)? \|", read("docs/http.md"), re.MULTILINE)
    }
    assert listed == request_fields()


def test_every_field_without_effect_or_refused_is_documented() -> None:
    from parent.protocols.openai.fields import IGNORED, NEUTRAL

    page = read("docs/http.md")
    ignored, _, refused = page.partition("Known and without effect:")[2].partition("Refused by name")
    assert set(re.findall(r"`(\w+)`", ignored)) == IGNORED
    assert set(NEUTRAL) <= set(re.findall(r"`(\w+)`", refused.partition("Other fields")[0]))


def test_the_changelog_has_the_version_and_dates_are_in_order() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert VERSION in versions
    assert versions[0] == "Unreleased"
    numbers = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)


def test_the_service_files_stop_later_than_a_drain() -> None:
    defaults = fields()
    needed = defaults["drain_s"].default + defaults["stop_grace_s"].default
    unit = read("deploy/systemd/mlxd.service")
    agent = read("deploy/launchd/mlxd.plist")
    stops = [
        re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE),
        re.search(r"<key>ExitTimeOut</key>\s*<integer>(\d+)</integer>", agent),
    ]
    for found in stops:
        assert found is not None
        assert int(found[1]) > needed


def test_the_licence_is_the_one_that_is_declared() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in read("LICENSE")
    assert "Version 2.0, January 2004" in read("LICENSE")
