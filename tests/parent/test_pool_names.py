"""Which model serves a request: names, profiles, fallbacks."""

from pathlib import Path

import pytest

from parent.inference.profiles import apply
from parent.library.catalog import ModelEntry
from parent.library.names import Found, Names
from parent.model_options import ModelOptions, Profile
from parent.pool.models import Choice, choose
from parent.protocols.base import DecodedRequest
from shared import wire
from shared.errors import Refused

A, B = (ModelEntry(id=name, path=Path(name)) for name in ("org/a", "org/b"))
NAMES = Names([A, B], {"org/b": ModelOptions(aliases=["bee"], profiles={"brief": Profile(max_tokens=3)})})


def pick(
    name: str, fallback: str = "", residents: tuple[ModelEntry, ...] = (), default: str = "org/a"
) -> Choice:
    return choose(name, NAMES.resolve, default=default, fallback=fallback, residents=residents)


@pytest.mark.parametrize(("name", "entry"), [("", A), ("org/b", B), ("bee", B), ("b", B), ("bee:brief", B)])
def test_a_known_name_is_served_by_its_model(name: str, entry: ModelEntry) -> None:
    choice = pick(name, fallback="resident", residents=(A,))
    assert (choice.entry, choice.is_fallback) == (entry, False)


@pytest.mark.parametrize(
    ("fallback", "residents", "entry"),
    [("resident", (B,), B), ("resident", (), A), ("bee", (), B), ("bee", (A,), A)],
)
def test_a_fallback_prefers_what_is_resident(
    fallback: str, residents: tuple[ModelEntry, ...], entry: ModelEntry
) -> None:
    choice = pick("gpt-4", fallback, residents)
    assert (choice.entry, choice.is_fallback) == (entry, True)


@pytest.mark.parametrize(
    ("name", "fallback", "default"), [("gpt-4", "", "org/a"), ("gpt-4", "resident", ""), ("", "", "")]
)
def test_without_a_fallback_an_unknown_name_is_refused(name: str, fallback: str, default: str) -> None:
    with pytest.raises(Refused) as refused:
        pick(name, fallback, default=default)
    assert refused.value.failure.param == "model"


PROFILE = Profile(
    temperature=0.1,
    top_k=5,
    repetition_penalty=1.1,
    max_tokens=9,
    max_context=100,
    thinking=False,
    template_kwargs={"x": 1},
)


def test_a_profile_fills_in_what_a_request_left_open() -> None:
    asked = DecodedRequest(prompts=[wire.ChatPrompt([{"role": "user", "content": "hi"}])])
    filled = apply(asked, PROFILE)
    assert filled.sampling == wire.Sampling(temperature=0.1, top_k=5, repetition_penalty=1.1)
    assert (filled.max_tokens, filled.max_context) == (9, 100)
    assert isinstance(filled.prompts[0], wire.ChatPrompt)
    assert filled.prompts[0].template_kwargs == {"enable_thinking": False, "x": 1}
    assert apply(asked, None) is asked


def test_a_request_wins_over_its_profile() -> None:
    asked = DecodedRequest(
        prompts=[wire.ChatPrompt([], {"enable_thinking": True})],
        sampling=wire.Sampling(temperature=0.0, repetition_penalty=1.0),
        max_tokens=1,
    )
    filled = apply(asked, PROFILE)
    assert filled.sampling == wire.Sampling(temperature=0.0, top_k=5, repetition_penalty=1.0)
    assert filled.max_tokens == 1
    assert isinstance(filled.prompts[0], wire.ChatPrompt)
    assert filled.prompts[0].template_kwargs == {"enable_thinking": True, "x": 1}
    text = apply(DecodedRequest(prompts=[wire.TextPrompt("x")]), PROFILE)
    assert text.prompts[0] == wire.TextPrompt("x")


def test_names_resolve_to_found() -> None:
    assert isinstance(NAMES.resolve("bee:brief"), Found)
