"""Features that several protocols have: one check each, in any dialect, streamed and whole."""

import json
from typing import Any

import pytest

from tests.conformance.asking import Asked, Dialect, Said, Server, Tool, both, user

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LAMP = Tool("set_lamp", SCHEMA)
DOOR = Tool("set_door", SCHEMA)
TOOLS = (LAMP, DOOR)
ASKED = Asked(user())


class NotHere(Exception):
    """The model at hand does not have what the feature is about."""


def is_form(text: str) -> bool:
    """Is it the JSON that `SCHEMA` demands?"""
    value = json.loads(text)
    return list(value) == ["on"] and isinstance(value["on"], bool)


def plain_text(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED)
    assert said.text
    assert said.reason in ("stop", "length")
    assert said.model == server.model, f"the answer is of {said.model}"


def system(server: Server, dialect: Dialect) -> None:
    told = [{"role": "system", "content": "Be brief."}, *user()]
    other = [{"role": "system", "content": "Be very, very brief."}, *user()]
    one, two = both(server, dialect, Asked(told)), both(server, dialect, Asked(other))
    assert two.prompt_tokens > one.prompt_tokens > 2


def developer(server: Server, dialect: Dialect) -> None:
    """The developer's words and the system's are the same."""
    answers = [
        both(server, dialect, Asked([{"role": role, "content": "Be brief."}, *user()]))
        for role in ("system", "developer")
    ]
    assert answers[0] == answers[1]


def several_turns(server: Server, dialect: Dialect) -> None:
    turns = [*user(), {"role": "assistant", "content": "sat"}, *user("and the hat")]
    alone = both(server, dialect, Asked(turns[:1]))
    assert both(server, dialect, Asked(turns)).prompt_tokens > alone.prompt_tokens + 3


def parts(server: Server, dialect: Dialect) -> None:
    """One part is the same prompt as a string; of two, none is lost."""
    one = [{"type": "text", "text": "the cat"}]
    alone = both(server, dialect, ASKED)
    assert both(server, dialect, Asked(user(one))) == alone
    two = both(server, dialect, Asked(user([*one, {"type": "text", "text": " sat on the mat"}])))
    assert two.prompt_tokens > alone.prompt_tokens


def _stopped(server: Server, dialect: Dialect) -> tuple[str, str, Said]:
    said = dialect.whole(server, ASKED._replace(max_tokens=24)).text
    assert len(said) > 16, f"too short to stop in: {said!r}"
    stop = said[7:16]
    asked = ASKED._replace(max_tokens=24, stop=("\x07never\x07", stop))
    return said[: said.index(stop)], stop, both(server, dialect, asked)


def stop_strings(server: Server, dialect: Dialect) -> None:
    """One that begins and ends inside of words: nothing of it is shown, nothing comes after it."""
    before, _, stopped = _stopped(server, dialect)
    assert (stopped.text, stopped.reason) == (before, "stop")


def which_stop(server: Server, dialect: Dialect) -> None:
    _, stop, stopped = _stopped(server, dialect)
    assert stopped.stopped_by == stop


def max_tokens(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED._replace(max_tokens=2))
    assert (said.tokens, said.reason) == (2, "length")


def seed_repeats(server: Server, dialect: Dialect) -> None:
    drawn = ASKED._replace(temperature=1.3, seed=11)
    first = both(server, dialect, drawn)
    assert dialect.whole(server, drawn).text == first.text
    others = {dialect.whole(server, drawn._replace(seed=seed)).text for seed in range(12, 14)}
    assert others != {first.text}, "every seed gives the same text"


def temperature_0(server: Server, dialect: Dialect) -> None:
    """Without a seed, again and again, streamed and not."""
    texts = {both(server, dialect, ASKED._replace(seed=None)).text for _ in range(2)}
    assert len(texts) == 1


def usage(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED)
    longer = both(server, dialect, Asked(user("the cat the cat the cat")))
    assert longer.prompt_tokens > said.prompt_tokens > 0
    assert 0 < said.tokens <= 12


def logprobs(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED._replace(max_tokens=8, logprobs=1))
    assert len(said.logprobs) in (said.tokens, said.tokens - 1)  # the end's own token is not of the text
    assert all(token.logprob <= 0 for token in said.logprobs)


def top_logprobs(server: Server, dialect: Dialect) -> None:
    """Of greedy text the chosen token is the likeliest."""
    said = both(server, dialect, ASKED._replace(max_tokens=8, logprobs=3))
    assert said.logprobs
    for token in said.logprobs:
        assert 1 <= len(token.top) <= 3  # text completions have one of those that look alike
        assert token.top == sorted(token.top, reverse=True)
        assert token.logprob == token.top[0]


def logit_bias(server: Server, dialect: Dialect) -> None:
    [token] = server.own("/tokenize", content="a", add_special=False)["tokens"]
    said = both(server, dialect, ASKED._replace(max_tokens=4, more={"logit_bias": {str(token): 100}}))
    assert said.text == "aaaa"


def penalties(server: Server, dialect: Dialect) -> None:
    long = ASKED._replace(max_tokens=24)
    penalised = long._replace(more={"frequency_penalty": 2, "presence_penalty": 2})
    assert both(server, dialect, penalised).text != both(server, dialect, long).text


def several_answers(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED._replace(n=3, temperature=1.3))
    assert len(said.texts) == 3
    assert len(set(said.texts)) > 1


def json_object(server: Server, dialect: Dialect) -> None:
    """A model that does not come to an end is cut off in the middle of an object, and of nothing else."""
    said = both(server, dialect, ASKED._replace(form=("object", None), max_tokens=24))
    assert said.text.lstrip().startswith("{")
    assert said.reason == "length" or isinstance(json.loads(said.text), dict)


def json_schema(server: Server, dialect: Dialect) -> None:
    assert is_form(both(server, dialect, ASKED._replace(form=("schema", SCHEMA), max_tokens=200)).text)


def regex_and_choice(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED._replace(form=("regex", "[ab]{3}"))).text
    assert len(said) == 3
    assert set(said) <= {"a", "b"}
    options = ["left", "right"]
    assert both(server, dialect, ASKED._replace(form=("choice", options))).text in options


WITH_TOOLS = ASKED._replace(tools=TOOLS, max_tokens=200)


def _are_calls(said: Said, *names: str) -> None:
    """Every call but one that was cut off is of these tools and has their arguments."""
    calls = said.calls if said.reason == "calls" else said.calls[:-1]
    assert all(name in names for name, _ in said.calls)
    assert all(is_form(arguments) for _, arguments in calls)


def tools_auto(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, WITH_TOOLS._replace(tool_choice="auto", max_tokens=24))
    _are_calls(said, "set_lamp", "set_door")
    assert said.calls or said.text


def tools_required(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, WITH_TOOLS._replace(tool_choice="required"))
    assert said.calls
    assert is_form(said.calls[0][1])
    _are_calls(said, "set_lamp", "set_door")


def tools_named(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, WITH_TOOLS._replace(tool_choice="set_lamp"))
    assert said.calls
    assert is_form(said.calls[0][1])
    _are_calls(said, "set_lamp")


def tools_none(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, WITH_TOOLS._replace(tool_choice="none", max_tokens=12))
    assert not said.calls
    assert said.text


def parallel_off(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, WITH_TOOLS._replace(tool_choice="required", parallel=False))
    assert len(said.calls) == 1
    assert said.reason == "calls"


def tool_results(server: Server, dialect: Dialect) -> None:
    """The call and its result both stand in the prompt of the next turn."""
    call = {
        "id": "call_00001",
        "type": "function",
        "function": {"name": "set_lamp", "arguments": '{"on": true}'},
    }
    turns = [
        *user(),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_00001", "content": "the lamp is on"},
    ]
    asked = Asked(turns, tools=TOOLS)
    said = both(server, dialect, asked)
    without = dialect.whole(server, asked._replace(messages=turns[:1]))
    shorter = [*turns[:2], turns[2] | {"content": "on"}]
    assert said.prompt_tokens > dialect.whole(server, asked._replace(messages=shorter)).prompt_tokens
    assert said.prompt_tokens > without.prompt_tokens + 10


def _thinking(server: Server) -> None:
    if not server.thinks:
        raise NotHere("the model does not think")


def thinking_on(server: Server, dialect: Dialect) -> None:
    _thinking(server)
    assert both(server, dialect, ASKED._replace(thinking=True)).thought


def thinking_off(server: Server, dialect: Dialect) -> None:
    """What comes is the answer, not a thought."""
    _thinking(server)
    said = both(server, dialect, ASKED._replace(thinking=False))
    assert said.text
    assert not said.thought


def thinking_budget(server: Server, dialect: Dialect) -> None:
    """After so many tokens the answer begins."""
    _thinking(server)
    said = both(server, dialect, ASKED._replace(thinking=5, max_tokens=32))
    assert said.thought
    assert said.text
    more = both(server, dialect, ASKED._replace(thinking=12, max_tokens=32))
    assert len(more.thought) > len(said.thought)


def prefill(server: Server, dialect: Dialect) -> None:
    """The answer goes on from a last turn of the assistant, as the bare continuation of that prompt does."""
    turns = [*user(), {"role": "assistant", "content": "It sat on"}]
    said = both(server, dialect, Asked(turns))
    ids = server.own("/tokenize", messages=turns)["tokens"]
    assert said.prompt_tokens == len(ids)
    bare = server.openai.completions.create(
        model=server.model, prompt=ids, temperature=0, max_tokens=ASKED.max_tokens, seed=7
    )
    assert said.text == bare.choices[0].text


def unknown_field(server: Server, dialect: Dialect) -> None:
    said = both(server, dialect, ASKED._replace(more={"no_such_field": {"a": [1]}}))
    assert said.text == dialect.whole(server, ASKED).text


def _refused(server: Server, dialect: Dialect, asked: Asked, kind: type[Exception], *, status: int) -> str:
    """The error that both ways give, of exactly this class."""
    for ask in (dialect.whole, dialect.streamed):
        with pytest.raises(kind) as caught:
            ask(server, asked)
        error = caught.value
        assert type(error) is kind
        assert error.status_code == status  # type: ignore[attr-defined]
    return f"{error} {getattr(error, 'body', '')}"


def bad_request(server: Server, dialect: Dialect) -> None:
    said = _refused(server, dialect, ASKED._replace(temperature=-3), dialect.bad_request, status=400)
    assert "temperature" in said


def unknown_model(server: Server, dialect: Dialect) -> None:
    asked = ASKED._replace(model="no-such-model")
    assert "no-such-model" in _refused(server, dialect, asked, dialect.not_found, status=404)


def context_exceeded(server: Server, dialect: Dialect) -> None:
    asked = Asked(user("the cat " * server.context))
    assert dialect.too_long in _refused(server, dialect, asked, dialect.bad_request, status=400)
