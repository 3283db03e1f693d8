"""Keys of a running server: by the official SDKs in their own errors, by our commands, and over a restart."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import ollama
import openai
import pytest

from tests.process.harness import Served, served

ROOT = Path(__file__).resolve().parents[2]
GREETING: Any = [{"role": "user", "content": "hello"}]


def mlxd(server: Served, *words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "parent", *words, "--data-dir", str(server.data_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input=given, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("keys"), {"tokens": 4}) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture(scope="module")
def key(server: Served) -> str:
    done = mlxd(server, "keys", "add", "laptop")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(params=["none", "wrong", "right"])
def given_key(request: pytest.FixtureRequest, key: str) -> str:
    return {"none": "", "wrong": "not-a-key-of-this", "right": key}[request.param]


def test_keys_by_openais_package(server: Served, key: str, given_key: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=given_key or "none", max_retries=0) as client:
        for ask in (
            lambda: client.chat.completions.create(model="fake", messages=GREETING),
            lambda: client.chat.completions.create(model="fake", messages=GREETING, stream=True),
            lambda: client.completions.create(model="fake", prompt="hello"),
            lambda: client.responses.create(model="fake", input="hello"),
            lambda: client.models.list(),
        ):
            if given_key == key:
                ask()
                continue
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_keys_by_anthropics_package(server: Served, key: str, given_key: str) -> None:
    for how in ("api_key", "auth_token"):
        with anthropic.Anthropic(base_url=server.url, max_retries=0, **{how: given_key or "none"}) as client:
            asked: Any = {"model": "fake", "max_tokens": 4, "messages": GREETING}
            if given_key == key:
                assert client.messages.create(**asked).content
                continue
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                client.messages.create(**asked)


def test_keys_by_ollamas_package(server: Served, key: str, given_key: str) -> None:
    headers = {"Authorization": f"Bearer {given_key}"} if given_key else {}
    client = ollama.Client(host=server.url, headers=headers, trust_env=False)
    if given_key == key:
        assert client.list().models
    else:
        with pytest.raises(ollama.ResponseError, match="key") as caught:
            client.list()
        assert caught.value.status_code == 401
    client._client.close()


def test_a_page_elsewhere_is_refused_before_its_key_is_looked_at(server: Served, key: str) -> None:
    headers = {"authorization": f"Bearer {key}", "origin": "http://evil.example"}
    assert httpx2.get(f"{server.url}/v1/models", headers=headers, trust_env=False).status_code == 403


def test_commands_of_this_machine_need_no_key(server: Served, key: str) -> None:
    for words in (("ps",), ("load", "fake"), ("launch", "opencode", "--dry-run"), ("doctor",)):
        done = mlxd(server, *words)
        assert "key" not in done.stderr, done.stderr
        assert done.returncode == 0 or words == ("doctor",), done.stderr
        assert key not in done.stdout
    done = mlxd(server, "chat", given="hello\n")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_keys_are_listed_added_and_removed(server: Served, key: str) -> None:
    own = "one-of-our-own-keys"
    assert mlxd(server, "keys", "add", "phone", "--key", "-", given=f"{own}\n").returncode == 0
    headers = {"x-api-key": own}
    assert httpx2.get(f"{server.url}/running", headers=headers, trust_env=False).status_code == 200
    listed = mlxd(server, "keys", "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["laptop", "phone"]
    assert own not in listed.stdout
    assert "phone" in mlxd(server, "keys").stdout
    refused = mlxd(server, "keys", "rm", "phone")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert mlxd(server, "keys", "rm", "phone", "--yes").returncode == 0
    assert httpx2.get(f"{server.url}/running", headers=headers, trust_env=False).status_code == 401


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("keys", "add"), "needs a name"),
        (("keys", "rm"), "needs a name"),
        (("keys", "ls", "x"), "takes no name"),
        (("keys", "rm", "nobody", "--yes"), "no key 'nobody'"),
        (("keys", "add", "laptop"), "there is a key"),
        (("keys", "rm", "laptop", "--key", "-"), "goes with"),
        (("keys", "add", "x", "--key", "secret-on-the-command-line"), "invalid choice"),
    ],
)
def test_wrong_commands_say_so_in_a_line(server: Served, key: str, words: tuple[str, ...], said: str) -> None:
    done = mlxd(server, *words)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
