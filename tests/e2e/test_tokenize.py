"""`/tokenize`, `/detokenize`, `/apply-template` and a template that refuses, with the real worker over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import Served
from tests.worker.test_render import REFUSES

TWO_USERS = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    model_dir = write_case("llama_tied", tmp_path_factory.mktemp("real") / "tiny")
    with serving(model_dir, tmp_path_factory.mktemp("served")) as running:
        running.wait_state("ready")
        yield running


def ask(server: Served, path: str, status: int = 200, **body: object) -> dict:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_tokenize_and_detokenize_keep_any_unicode_over_http(server, text):
    found = ask(server, "/tokenize", content=text)
    assert found["count"] == len(found["tokens"])
    assert ask(server, "/detokenize", tokens=found["tokens"]) == {"content": text, "prompt": text}


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"a \\udc00"', b'"\xff"'])
def test_tokenize_refuses_half_a_character(server, text):
    answer = server.http.post("/tokenize", content=b'{"content": %b}' % text)
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]["message"]


def test_tokenize_pieces_and_the_size_of_the_context(server):
    found = ask(server, "/tokenize", content="the é東\x00", with_pieces=True)
    raw = b""
    for token in found["tokens"]:
        raw += token["piece"].encode() if isinstance(token["piece"], str) else bytes(token["piece"])
    assert raw.decode() == "the é東\x00"
    assert found["max_model_len"] == server.engine()["facts"]["context"]


def test_template_is_shown_as_chat_reads_it(server):
    shown = ask(server, "/apply-template", messages=TWO_USERS[:1])
    assert shown["prompt"] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert ask(server, "/tokenize", messages=TWO_USERS[:1])["count"] == shown["count"]
    usage = ask(server, "/v1/chat/completions", messages=TWO_USERS[:1], max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == shown["count"]
    goes_on = ask(server, "/apply-template", messages=[TWO_USERS[0], {"role": "assistant", "content": "so"}])
    assert goes_on["prompt"].endswith("<|im_start|>assistant\nso")
    tool = {"type": "function", "function": {"name": "look_up"}}
    assert "look_up" in ask(server, "/apply-template", messages=TWO_USERS, tools=[tool])["prompt"]


def test_detokenize_refuses_what_is_no_token(server):
    assert ask(server, "/detokenize", 400, tokens=[999_999])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("messages", ["auto", "as_sent"])
def test_normalise_a_template_that_refuses_by_the_option_of_the_model(tmp_path, messages):
    """bugs.md A4: repaired, or 400 with the template's own words, before any event of a stream."""
    model_dir: Path = write_case("llama_tied", tmp_path / "tiny")
    (model_dir / "chat_template.jinja").write_text(REFUSES, encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text(f'[models.tiny]\nmessages = "{messages}"\n')
    with serving(model_dir, tmp_path) as server:
        server.wait_state("ready")
        for path, stream in (
            ("/v1/chat/completions", True),
            ("/v1/chat/completions", False),
            ("/tokenize", None),
        ):
            body = {"messages": TWO_USERS} | ({} if stream is None else {"stream": stream, "max_tokens": 2})
            answer = server.http.post(path, json=body)
            if messages == "auto":
                assert answer.status_code == 200
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "template_failed")
            assert error["type"] == "invalid_request_error"
            assert error["message"].endswith(
                "refused the request at messages[1] (role 'user'): roles must alternate"
            )
