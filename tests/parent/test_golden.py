"""Golden cases: `tests/golden/<protocol>/<case>/` holds a request, events, and the exact bytes that leave.

`request.json` is the client's body, `events.ndjson` what the worker says (one batch per line, a list), and
`stream.txt` and `whole.json` what the client gets, streamed and not.
"""

from pathlib import Path

import msgspec
import pytest

from parent.protocols import PROTOCOLS
from parent.protocols.base import Answer, Manners, Meta, Protocol
from shared import wire

FOLDER = Path(__file__).resolve().parents[1] / "golden"
CASES = [(protocol, case) for protocol in PROTOCOLS for case in sorted((FOLDER / protocol.name).iterdir())]
_decode_batch = msgspec.json.Decoder(list[wire.Event]).decode


def render(protocol: Protocol, case: Path) -> tuple[bytes, bytes]:
    """What leaves: the stream, and the whole answer or error."""
    asked = protocol.decode((case / "request.json").read_bytes(), Manners())
    meta = Meta("0123456789abcdef", 1700000000, asked.model or "served/model", asked, fingerprint="fp_0123")
    encoder, whole, stream = protocol.stream(meta), Answer(), b""
    for line in (case / "events.ndjson").read_bytes().splitlines():
        events = _decode_batch(line)
        last = events[-1]
        if isinstance(last, wire.Failed):
            return stream + encoder.fail(last.failure), protocol.error(last.failure)[1]
        whole.add(events)
        if isinstance(last, wire.Finish):
            stream += encoder.feed(events[:-1]) if len(events) > 1 else b""
            return stream + encoder.finish(last), protocol.answer(meta, [whole])
        stream += encoder.feed(events)
    raise AssertionError(f"{case}: no last event")


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
        assert {"plain", "failed_midway", "usage_asked_for"} <= names
