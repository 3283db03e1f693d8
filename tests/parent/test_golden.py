"""Golden cases: `tests/golden/<protocol>/<case>/` holds a request, events, and the exact bytes that leave.

`request.json` is the client's body, `events.ndjson` what the worker says (one batch per line, a list; of a request
with several answers `{"choice": 1, "events": […]}`), and `stream.txt` and `whole.json` what the client gets, streamed
and not. `manners.json`, where there is one, says how the server speaks.
"""

from pathlib import Path

import msgspec
import pytest

from parent.protocols import PROTOCOLS
from parent.protocols.base import Answer, Manners, Meta, Protocol
from shared import wire

FOLDER = Path(__file__).resolve().parents[1] / "golden"
CASES = [(protocol, case) for protocol in PROTOCOLS for case in sorted((FOLDER / protocol.name).iterdir())]


class Batch(msgspec.Struct):
    """Events of one choice."""

    events: list[wire.Event]
    choice: int = 0


_decode_line = msgspec.json.Decoder(Batch | list[wire.Event]).decode


def batches(case: Path) -> list[Batch]:
    """What the worker says."""
    lines = map(_decode_line, (case / "events.ndjson").read_bytes().splitlines())
    return [line if isinstance(line, Batch) else Batch(line) for line in lines]


def manners_of(case: Path) -> Manners:
    path = case / "manners.json"
    return msgspec.json.decode(path.read_bytes(), type=Manners) if path.exists() else Manners()


def render(protocol: Protocol, case: Path) -> tuple[bytes, bytes]:
    """What leaves: the stream, and the whole answer or error."""
    manners = manners_of(case)
    asked = protocol.decode((case / "request.json").read_bytes(), manners)
    model = asked.model or "served/model"
    meta = Meta("0123456789abcdef", 1700000000, model, asked, manners, fingerprint="fp_0123")
    answers = [Answer() for _ in range(meta.num_choices)]
    encoder, stream, running = protocol.stream(meta), b"", meta.num_choices
    for batch in batches(case):
        last = batch.events[-1]
        if isinstance(last, wire.Failed):
            return stream + encoder.fail(last.failure), protocol.error(last.failure)[1]
        answers[batch.choice].add(batch.events)
        if isinstance(last, wire.Finish):
            if len(batch.events) > 1:
                stream += encoder.feed(batch.events[:-1], batch.choice)
            stream += encoder.finish(last, batch.choice)
            running -= 1
        else:
            stream += encoder.feed(batch.events, batch.choice)
    assert running == 0, f"{case}: no last event"
    return stream, protocol.answer(meta, answers)


@pytest.mark.parametrize(
    ("protocol", "case"), [pytest.param(*each, id=f"{each[0].name}/{each[1].name}") for each in CASES]
)
def test_the_bytes_are_exactly_those_of_the_golden_case(protocol: Protocol, case: Path) -> None:
    stream, whole = render(protocol, case)
    assert stream == (case / "stream.txt").read_bytes()
    assert whole == (case / "whole.json").read_bytes()


def test_every_protocol_has_golden_cases_an_error_among_them() -> None:
    for protocol in PROTOCOLS:
        names = {path.name for path in (FOLDER / protocol.name).iterdir()}
        assert {"plain", "failed_midway"} <= names
