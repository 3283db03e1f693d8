"""Features that one protocol has, or that each has in a way of its own."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.conformance.asking import Asked, Dialect, Server, user
from tests.conformance.dialect_anthropic import arguments as messages_arguments
from tests.conformance.dialect_responses import arguments as responses_arguments

CAT: Any = {"temperature": 0, "seed": 7, "max_tokens": 12}


def count_anthropic(server: Server, dialect: Dialect) -> None:
    asked = messages_arguments(server, Asked([{"role": "system", "content": "Be brief."}, *user()]))
    told = {name: asked[name] for name in ("model", "messages", "system", "thinking") if name in asked}
    usage = server.anthropic.messages.create(**told, max_tokens=1).usage
    counted = server.anthropic.messages.count_tokens(**told).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def count_responses(server: Server, dialect: Dialect) -> None:
    asked = responses_arguments(server, Asked(user(), max_tokens=1))
    usage = server.openai.responses.create(**asked).usage
    assert usage is not None
    told = {name: asked[name] for name in ("model", "input", "extra_body")}
    assert server.openai.responses.input_tokens.count(**told).input_tokens == usage.input_tokens


def count_chat(server: Server, dialect: Dialect) -> None:
    """By our own `/tokenize`: OpenAI's chats have no count."""
    said = dialect.whole(server, Asked(user()))
    assert server.own("/tokenize", messages=user())["count"] == said.prompt_tokens


def count_text(server: Server, dialect: Dialect) -> None:
    said = dialect.whole(server, Asked(user()))
    assert server.own("/tokenize", content="the cat")["count"] == said.prompt_tokens


def echo(server: Server, dialect: Dialect) -> None:
    asked: Any = {"model": server.model, "prompt": "the cat", **CAT}
    plain = server.openai.completions.create(**asked).choices[0].text
    assert server.openai.completions.create(**asked, echo=True).choices[0].text == "the cat" + plain
    chunks = list(server.openai.completions.create(**asked, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "the cat" + plain


def token_arrays(server: Server, dialect: Dialect) -> None:
    ids = server.own("/tokenize", content="the cat")["tokens"]
    of_text = server.openai.completions.create(model=server.model, prompt="the cat", **CAT)
    of_ids = server.openai.completions.create(model=server.model, prompt=ids, **CAT)
    assert of_ids.choices[0].text == of_text.choices[0].text
    assert of_ids.usage == of_text.usage


def batch(server: Server, dialect: Dialect) -> None:
    prompts = ["the cat", "a hat and", "one"]
    asked: Any = {"model": server.model, **CAT}
    alone = [server.openai.completions.create(**asked, prompt=each).choices[0].text for each in prompts]
    together = server.openai.completions.create(**asked, prompt=prompts)
    assert [choice.text for choice in together.choices] == alone
    texts = [""] * 3
    for chunk in server.openai.completions.create(**asked, prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def models_openai(server: Server, dialect: Dialect) -> None:
    listed = list(server.openai.models.list())
    assert server.model in [model.id for model in listed] or server.row()
    for model in listed:
        assert server.openai.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("no-such-model")


def models_anthropic(server: Server, dialect: Dialect) -> None:
    for model in server.anthropic.models.list():
        assert server.anthropic.models.retrieve(model.id) == model
        assert (model.type, bool(model.display_name)) == ("model", True)
    with pytest.raises(dialect.not_found):
        server.anthropic.models.retrieve("no-such-model")


def models_ollama(server: Server, dialect: Dialect) -> None:
    names = [model.model for model in server.ollama.list().models]
    assert names
    for name in names:
        assert name is not None
        assert server.ollama.show(name).details is not None
    with pytest.raises(dialect.not_found):
        server.ollama.show("no-such-model")


def _made(server: Server, **more: Any) -> Response:
    asked = responses_arguments(server, Asked(user(), max_tokens=8))
    found: Response = server.openai.responses.create(**asked | more)
    return found


def store(server: Server, dialect: Dialect) -> None:
    made = _made(server)
    assert server.openai.responses.retrieve(made.id) == made
    server.openai.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(made.id)
    unstored = _made(server, store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(unstored.id)


def input_items(server: Server, dialect: Dialect) -> None:
    made = _made(server)
    [item] = server.openai.responses.input_items.list(made.id)
    assert item.type == "message"
    assert item.content[0].text == "the cat"  # type: ignore[union-attr]


def previous_response(server: Server, dialect: Dialect) -> None:
    """The conversation goes on: the prompt is that of the turns themselves."""
    made = _made(server)
    following = _made(server, input="and the hat", previous_response_id=made.id)
    turns = [*user(), {"role": "assistant", "content": made.output_text}, *user("and the hat")]
    said = dialect.whole(server, Asked(turns, max_tokens=8))
    assert following.usage is not None
    assert (following.output_text, following.usage.input_tokens) == (said.text, said.prompt_tokens)


def background(server: Server, dialect: Dialect) -> None:
    begun = _made(server, background=True)
    assert begun.status in ("queued", "in_progress")
    *_, last = server.openai.responses.retrieve(begun.id, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    ended = server.openai.responses.retrieve(begun.id)
    assert ended.output_text == _made(server).output_text


def cancel(server: Server, dialect: Dialect) -> None:
    """Cancelled, or over before it could be; never still under way."""
    asked = responses_arguments(server, Asked(user(), max_tokens=400, temperature=1.5))
    begun = server.openai.responses.create(**asked, background=True)
    ended = server.openai.responses.cancel(begun.id)
    assert ended.status in ("cancelled", "completed", "incomplete")
    assert server.openai.responses.retrieve(begun.id).status == ended.status


def apply_template(server: Server, dialect: Dialect) -> None:
    """The prompt of a chat, and its tokens, are what the chat itself reads."""
    shown = server.own("/apply-template", messages=user())
    tokens = server.own("/tokenize", messages=user())["tokens"]
    said = dialect.whole(server, Asked(user()))
    assert "the cat" in shown["prompt"]
    assert shown["count"] == len(tokens) == said.prompt_tokens


def tokenize(server: Server, dialect: Dialect) -> None:
    text = 'Zürich } "東京" \U0001f600'
    tokens = server.own("/tokenize", content=text, add_special=False)["tokens"]
    assert server.own("/detokenize", tokens=tokens)["content"] == text


def embeddings_openai(server: Server, dialect: Dialect) -> None:
    found = server.openai.embeddings.create(model=server.model, input=["the cat", "a hat"])
    alone = server.openai.embeddings.create(model=server.model, input="a hat", encoding_format="float")
    assert found.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-3)
    assert found.data[0].embedding != found.data[1].embedding


def embeddings_ollama(server: Server, dialect: Dialect) -> None:
    found = server.ollama.embed(model=server.model, input=["the cat", "a hat"]).embeddings
    [alone] = server.ollama.embed(model=server.model, input="a hat").embeddings
    assert list(found[1]) == pytest.approx(list(alone), abs=1e-3)
