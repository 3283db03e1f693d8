"""Golden cases of Ollama's two formats, as those of `test_golden`; their clock stands still."""

from pathlib import Path

import pytest

from parent.protocols.base import Protocol
from parent.protocols.ollama import formats as ollama
from parent.protocols.ollama.answer import Moment
from tests.parent.test_golden import FOLDER, render

NOW = Moment("2026-01-02T03:04:05.678901Z", 9_000_000_000)
PROTOCOLS = (ollama.chat(lambda: NOW), ollama.generate(lambda: NOW))
CASES = [(protocol, case) for protocol in PROTOCOLS for case in sorted((FOLDER / protocol.name).iterdir())]


@pytest.mark.parametrize(
    ("protocol", "case"), [pytest.param(*each, id=f"{each[0].name}/{each[1].name}") for each in CASES]
)
def test_ollama_bytes_are_exactly_those_of_the_golden_case(protocol: Protocol, case: Path) -> None:
    stream, whole = render(protocol, case)
    assert stream == (case / "stream.txt").read_bytes()
    assert whole == (case / "whole.json").read_bytes()
