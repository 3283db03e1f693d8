"""Golden cases of the Responses API, as those of `test_golden`; only the route is one of its own."""

from pathlib import Path

import pytest

from parent.protocols.responses import decode as responses
from tests.parent.test_golden import FOLDER, render

CASES = sorted((FOLDER / "responses").iterdir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_responses_bytes_are_exactly_those_of_the_golden_case(case: Path) -> None:
    stream, whole = render(responses.PROTOCOL, case)
    assert stream == (case / "stream.txt").read_bytes()
    assert whole == (case / "whole.json").read_bytes()
