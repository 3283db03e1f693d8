"""The composition: what the parent must never import, and the static files it may serve."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from parent.routes.static import Static
from shared import asgi
from shared.errors import ErrorCode, Refused

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = ["mlx", "numpy", "tokenizers", "safetensors", "jinja2", "worker", "transformers", "torch"]


@pytest.mark.parametrize("module", ["parent.app", "parent.server", "parent.jobs.run"])
def test_the_parent_never_imports_what_belongs_to_a_worker(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {FORBIDDEN} if name in sys.modules])"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert found.strip() == ""


@pytest.mark.parametrize("module", ["parent.workers.states", "parent.inference.states"])
def test_the_state_tables_print_as_markdown(module: str) -> None:
    table = subprocess.check_output([sys.executable, "-m", module], cwd=ROOT, text=True)
    assert table.startswith("| from | event | guard | to | effects |\n|---|")


def get(static: Static, name: str, headers: list[tuple[bytes, bytes]] | None = None) -> list[asgi.Message]:
    """The messages of one answer."""
    sent: list[asgi.Message] = []

    async def send(message: asgi.Message) -> None:
        sent.append(message)

    async def receive() -> asgi.Message:
        raise AssertionError("no body is read")

    scope = {"headers": headers or [], "path_params": {"name": name}}
    asyncio.run(static.file(scope, receive, send))
    return sent


@pytest.fixture
def static(tmp_path: Path) -> Static:
    folder = tmp_path / "static"
    (folder / "chat").mkdir(parents=True)
    (folder / "chat" / "app.js").write_text("export {};")
    (folder / "notes.py").write_text("secret = 1")
    (tmp_path / "outside.js").write_text("secret")
    return Static(folder)


def test_a_packaged_file_has_its_type_a_strict_policy_and_an_etag(static: Static) -> None:
    start, body = get(static, "chat/app.js")
    headers = dict(start["headers"])
    assert (start["status"], body["body"]) == (200, b"export {};")
    assert headers[b"content-type"] == b"text/javascript; charset=utf-8"
    assert headers[b"content-security-policy"].startswith(b"default-src 'self'")
    again = get(static, "chat/app.js", [(b"if-none-match", headers[b"etag"])])
    assert (again[0]["status"], again[1]["body"]) == (304, b"")


@pytest.mark.parametrize(
    "name", ["../outside.js", "chat/../../outside.js", "/etc/passwd", "notes.py", "chat", "", "chat/app.js/"]
)
def test_nothing_but_the_listed_files_is_found(static: Static, name: str) -> None:
    with pytest.raises(Refused) as refused:
        get(static, name)
    assert refused.value.failure.code is ErrorCode.NOT_FOUND
