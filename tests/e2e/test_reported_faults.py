"""Faults that were reported of servers of this kind, asked of this one with a real worker.

| reported as | what went wrong there | what holds here |
|---|---|---|
| ml-explore/mlx-lm#185, lmstudio-ai/lmstudio-bug-tracker#261, Blaizzy/mlx-vlm#1785 | null content beside calls | here |
| ggml-org/llama.cpp#25510 | broken arguments in history are a 500 | here |
| ml-explore/mlx-examples#1195 | content as parts breaks templates | here |
| janhq/jan#6254, vllm-project/vllm#16774 | a template that refuses is a 500 | `tests/e2e/test_tokenize.py` |
| ollama/ollama#10139, #13715 | ids with slashes are not found | `tests/process/test_serving.py` |
| ml-explore/mlx-lm#632, Blaizzy/mlx-vlm#1132 | no cache folder, no list of models | here |
| mostlygeek/llama-swap#454 | answers have another model's name | here |
| ollama/ollama#7881, BerriAI/litellm#33678, continuedev/continue#13225 | calls without index or id | here |
| waybarrios/vllm-mlx#107, ollama/ollama#9632, raullenchai/Rapid-MLX#455 | calls are text in streams | here |
| Blaizzy/mlx-vlm#1771, exo-explore/exo#1691, jundot/omlx#1649 | characters split over tokens | here |
| Blaizzy/mlx-vlm#1129 | text held back until a word ends | `tests/worker/text/test_detokenizer.py` |
| ggml-org/llama.cpp#24957, Sophomoresty/gemini-web2api#57 | events missing | `tests/conformance/dialect_responses.py` |
| ml-explore/mlx-lm#607, #899, #1441 | a malformed call kills the request | `tests/worker/text/test_toolcalls.py` |
| vllm-project/vllm#10395, #32152, #28806 | streamed arguments differ | here, `tests/e2e/test_openai_sdk.py` |
| sgl-project/sglang#37634, #34677 | of several calls in one step one is lost | `tests/worker/text/test_toolcalls.py` |
| vllm-project/vllm#53284, #35982 | thinking off, the answer is filed as thinking | `tests/conformance/features.py` |
| vllm-project/vllm#45687 | marks in pieces, text that looks like one | here, `tests/worker/text/test_reasoning.py` |
| ml-explore/mlx-examples#524, mzau/mlx-knife#68, lablup/mlxcel#1466 | stops compared with tokens | here |
| Blaizzy/mlx-vlm#2112, #309, #1501 | one source of end ids of three | `tests/worker/test_pipeline.py` |
| ml-explore/mlx-lm#1215 | the same prompt again kills generation | here |
| ml-explore/mlx-lm#1472, #1477, #1129, #1166 | unlike requests in one batch | here |
| Blaizzy/mlx-vlm#1542, ml-explore/mlx-lm#1906 | short rows attend to padding | here |
| ggml-org/llama.cpp#24496, ikawrakow/ik_llama.cpp#1020 | gone clients go on | `tests/process/test_disconnect.py` |
"""  # fmt: skip

import concurrent.futures
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.asking import Asked, Server, both, user
from tests.conformance.dialects import DIALECTS
from tests.conformance.features import TOOLS
from tests.conformance.served import write_tiny
from tests.e2e.real import serving

ROOT = Path(__file__).resolve().parents[2]
CHATS = ("chat", "responses", "anthropic")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "data").mkdir()
    (folder / "data" / "mlxd.toml").write_text('[models.tiny]\naliases = ["small/one"]\n')
    with serving(write_tiny(folder / "tiny"), folder) as running:
        running.wait_state("ready")
        asking = Server(running.url)
        yield asking
        asking.close()


def prompt(server: Server, messages: list[dict[str, Any]]) -> str:
    shown: str = server.own("/apply-template", messages=messages)["prompt"]
    return shown


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "measure", "arguments": arguments}}


def history(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    turn = {"role": "assistant", "tool_calls": [call(arguments)], **content}
    return [*user("how much?"), turn, {"role": "tool", "tool_call_id": "c1", "content": "5 apples"}]


@pytest.mark.parametrize(
    "content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "left out"]
)
def test_a_call_without_content_and_its_result_are_both_in_the_prompt(server: Server, content: Any) -> None:
    shown = prompt(server, history("{}", **content))
    assert "measure" in shown
    assert "5 apples" in shown
    assert shown == prompt(server, history("{}", content=None))
    assert both(server, DIALECTS["chat"], Asked(history("{}", **content), tools=TOOLS)).tokens


@pytest.mark.parametrize("arguments", ["{", "", "[1]", "word", {"a": 1}, '{"a": "\\d"}'], ids=repr)
def test_broken_arguments_in_history_are_shown_as_they_are(server: Server, arguments: Any) -> None:
    shown = prompt(server, history(arguments, content=None))
    told = json.dumps(arguments) if isinstance(arguments, dict) else arguments
    assert told in shown or json.dumps(told)[1:-1] in shown
    assert "5 apples" in shown
    assert both(server, DIALECTS["chat"], Asked(history(arguments, content=None))).tokens


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_one_text_part_is_the_prompt_of_a_string_and_no_part_is_lost(server: Server, role: str) -> None:
    def talk(content: Any) -> list[dict[str, Any]]:
        turns = {
            "system": [{"role": "system", "content": content}, *user()],
            "user": user(content),
            "assistant": [*user(), {"role": "assistant", "content": content}, *user()],
            "tool": [*history("{}", content=None)[:2], {"role": "tool", "tool_call_id": "c1", "content": content}],
        }  # fmt: skip
        return turns[role]

    one, other = {"type": "text", "text": "the hat"}, {"type": "text", "text": "and more"}
    assert prompt(server, talk([one])) == prompt(server, talk("the hat"))
    shown = prompt(server, talk([one, other]))
    assert "the hat" in shown
    assert "and more" in shown


def test_models_are_listed_where_there_is_no_cache_folder(server: Server) -> None:
    """The suite's `HF_HOME` names a folder that is not there."""
    assert [model.id for model in server.openai.models.list()] == ["tiny"]


@pytest.mark.parametrize("column", DIALECTS)
@pytest.mark.parametrize("name", ["tiny", "small/one"])
def test_the_name_that_was_asked_for_is_in_every_answer(server: Server, column: str, name: str) -> None:
    assert both(server, DIALECTS[column], Asked(user(), max_tokens=3, model=name)).model == name
    with pytest.raises(DIALECTS[column].bad_request) as caught:
        DIALECTS[column].whole(server, Asked(user("the cat " * server.context), model=name))
    assert name in str(caught.value) or "tiny" not in str(caught.value)


def test_the_name_that_was_asked_for_is_in_every_chunk(server: Server) -> None:
    asked: dict[str, Any] = {"model": "small/one", "max_tokens": 3}
    chats = list(server.openai.chat.completions.create(**asked, messages=user(), stream=True))
    texts = list(server.openai.completions.create(**asked, prompt="the", stream=True))
    assert {chunk.model for chunk in [*chats, *texts]} == {"small/one"}


@pytest.mark.parametrize("column", CHATS)
def test_calls_are_calls_streamed_and_whole_and_nothing_of_them_is_text(server: Server, column: str) -> None:
    """`both` counts their indexes, joins their arguments and compares."""
    asked = Asked(user(), tools=TOOLS, tool_choice="required", max_tokens=300, temperature=1, seed=3)
    said = both(server, DIALECTS[column], asked)
    assert said.calls
    assert not said.text.strip()
    for name, arguments in said.calls if said.reason == "calls" else said.calls[:-1]:
        assert name in ("set_lamp", "set_door")
        assert list(json.loads(arguments)) == ["on"]


HARD = "👩‍👩‍👧‍👦 🇨🇭東京 é한국"


def written(text: str, **more: Any) -> Asked:
    """A request whose answer is this text, a byte a token."""
    return Asked(user(), form=("choice", [text]), max_tokens=200)._replace(**more)


def test_characters_that_are_several_tokens_come_whole_alone_and_in_a_batch(server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user(), "extra_body": {"guided_choice": [HARD]}}

    def pieces(_: int) -> list[str]:
        chunks = server.openai.chat.completions.create(**asked, stream=True)
        return [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]

    assert both(server, DIALECTS["chat"], written(HARD)).text == HARD
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for found in pool.map(pieces, range(6)):
            assert "".join(found) == HARD
            assert not any("\ufffd" in piece for piece in found)


def test_an_answer_that_is_cut_off_inside_a_character_has_one_replacement_at_most(server: Server) -> None:
    for tokens in range(1, len(HARD.encode()), 3):
        said = both(server, DIALECTS["chat"], written(HARD, max_tokens=tokens))
        assert said.reason == "length"
        assert HARD.startswith(said.text.removesuffix("\ufffd"))


@pytest.mark.parametrize("text", ["a < b", "1 </thin", "<thin air>", "a <tool_cal", "x [TOOL_", "</"])
def test_text_that_only_looks_like_a_mark_comes_whole(server: Server, text: str) -> None:
    for column in ("chat", "completions"):
        assert both(server, DIALECTS[column], written(text)).text == text


@pytest.mark.parametrize(
    ("stop", "left"),
    [("efg", "abcdef"), ("fa", "abcdef"), ("cde", "ab"), ("def", "abc"), ("a", ""), ("abcdef", "")],
)
def test_a_stop_that_only_begins_is_delivered_and_one_that_fires_leaves_nothing(
    server: Server, stop: str, left: str
) -> None:
    for column in ("chat", "completions"):
        said = both(server, DIALECTS[column], written("abcdef", stop=(stop,)))
        assert (said.text, said.reason) == (left, "stop")


@pytest.mark.parametrize("column", DIALECTS)
def test_the_same_request_again_gives_the_same_text(server: Server, column: str) -> None:
    asked = Asked(user("again and again " * 20), max_tokens=12)
    assert both(server, DIALECTS[column], asked) == both(server, DIALECTS[column], asked)


UNLIKE: list[dict[str, Any]] = [
    {},
    {"logit_bias": {"90": 5, "91": -100}},
    {"frequency_penalty": 1.5, "presence_penalty": 1},
    {"repetition_penalty": 1.3},
    {"logprobs": True, "top_logprobs": 4},
    {"temperature": 1.1, "seed": 5, "top_k": 20},
    {"guided_regex": "[ab]{20}"},
    {"stop": ["a", "th"]},
    {"min_p": 0.05, "temperature": 0.8, "seed": 8},
]


def test_unlike_requests_of_any_length_at_once_are_each_as_alone(server: Server) -> None:
    """Biases, penalties, log-probabilities, grammars and seeds beside plain ones; prompts of 1 to 3,000 tokens."""
    lengths = (1, 30, 400, 3000)
    asked = [
        {"messages": user("a" * lengths[number % 4]), "temperature": 0, "max_tokens": 10 + number % 7}
        | fields
        for number, fields in enumerate(UNLIKE * 3)
    ]

    def ask(body: dict[str, Any]) -> tuple[str, str, list[str]]:
        answer = server.http.post("/v1/chat/completions", json=body)
        choice = answer.raise_for_status().json()["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        return choice["message"]["content"], choice["finish_reason"], [each["token"] for each in tokens]

    alone = [ask(body) for body in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(ask, asked)) == alone
    assert server.http.get("/ready").status_code == 200


def test_the_places_that_the_table_names_exist() -> None:
    for place in re.findall(r"`(tests/[\w/.]+)`", __doc__ or ""):
        assert (ROOT / place).is_file(), place
