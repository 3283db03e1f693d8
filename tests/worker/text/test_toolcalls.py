"""Calls of tools in every format: what is a call, what is text, and that no cut of the stream changes it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.text.calls import every_cut, parse
from tests.worker.text.golden_calls import CASES
from worker.text.toolcalls import TABLE
from worker.text.toolcalls.form import Format

FORMATS = {form.name: form for _, form in TABLE}
ALL = [(name, said, wanted) for name, cases in CASES.items() for said, wanted in cases]


@pytest.mark.parametrize(("name", "said", "wanted"), ALL)
def test_tools_every_cut_of_a_golden_text_gives_the_same_calls_and_text(name, said, wanted):
    assert every_cut(said, FORMATS[name]) == wanted


def test_tools_whole_calls_have_arguments_that_are_json_objects():
    for _, _, wanted in ALL:
        for part in wanted:
            if part[0].startswith("call") and len(part) == 2:
                assert isinstance(json.loads(part[1]), dict)


def _parts(name: str) -> list[str]:
    """Stretches of a format's golden texts, and its marks."""
    texts = [said for said, _ in CASES[name]]
    cut = {said[at : at + size] for said in texts for size in (1, 6, 17) for at in range(0, len(said), 5)}
    return [*sorted(cut), *FORMATS[name].marks, *FORMATS[name].begins]


@pytest.mark.parametrize("name", CASES)
def test_tools_any_text_of_markup_is_cut_at_will_and_nothing_of_it_is_lost(name):
    form: Format = FORMATS[name]

    @given(st.lists(st.sampled_from(_parts(name)), max_size=12), st.randoms(use_true_random=False))
    def holds(parts, random):
        said = "".join(parts)
        wanted = parse([said], form)
        assert parse(list(said), form) == wanted
        cuts = sorted(random.sample(range(len(said) + 1), min(3, len(said))))
        pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        assert parse(pieces, form) == wanted
        if not any(part[0].startswith("call") for part in wanted) and name != "harmony":
            assert "".join(part[1] for part in wanted) == said

    holds()


@pytest.mark.parametrize("name", CASES)
def test_tools_without_tools_in_the_request_nothing_is_a_call(name):
    for said, _ in CASES[name]:
        kinds = {part[0] for part in every_cut(said, None if name != "harmony" else FORMATS[name], tools={})}
        assert kinds <= {"text"} if name != "harmony" else kinds <= {"text", "reasoning"}


@pytest.mark.parametrize("name", CASES)
def test_tools_markup_without_end_is_read_once(name):
    """Text that begins calls over and over takes time in proportion to its length: it is read in one go."""
    form = FORMATS[name]
    begin = {"llama_json": "[{" * 50, "pythonic": "[[("}.get(name, form.lead)
    said = (begin + '{"arguments": {"a": ') * 3000
    assert "".join(part[1] for part in parse([said], form))
