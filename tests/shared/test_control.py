"""The control channel's messages: all survive the wire, unknown fields do no harm, unknown types are told apart."""

from typing import Any, get_args

import msgspec
import pytest

from shared import control, jobs, ndjson, wire
from shared.errors import ErrorCode, Failure

FACTS = wire.ModelFacts(family="llama", context=10, vocab_size=5, eos_ids=[1, 2], dtype="float32")
UP: list[Any] = [
    control.Hello(1, "0.1.0", 5),
    control.Progress("weights", 1, 2),
    control.Ready(FACTS, 7),
    control.Heartbeat(wire.WorkerStats(steps=3), 0.5),
    control.Drained(),
    control.Fatal(Failure(ErrorCode.CANNOT_FIT, "too large")),
    control.JobUpdate(jobs.JobStage(stage="x", done=1, total=2), seq=3),
]
DOWN: list[Any] = [
    control.LaunchModel(model_id="m", path="/m"),
    control.LaunchJob(job_id="j", spec=jobs.ImportGguf(source="/a.gguf", name="a"), output="/out"),
    control.Adopt(3, "0.1.0", "secret", heard=4),
    control.Heard(4),
    control.Hold(),
    control.GoOn(),
    control.Drain(),
    control.Resize(kv_bytes=1, prefix_cache_bytes=2),
    control.Cancel(),
    control.Shutdown(),
]


def test_the_lists_below_hold_every_message() -> None:
    assert {type(message) for message in UP} == set(get_args(control.FromWorker))
    assert {type(message) for message in DOWN} == set(get_args(control.ToWorker))


@pytest.mark.parametrize(
    ("message", "union"),
    [(each, control.FromWorker) for each in UP] + [(each, control.ToWorker) for each in DOWN],
)
def test_every_message_survives_the_wire_and_unknown_fields(message: Any, union: Any) -> None:
    (line,) = ndjson.Lines().feed(ndjson.encode(message))
    assert msgspec.json.decode(line, type=union) == message
    newer = msgspec.json.decode(line) | {"a_field_of_tomorrow": [1]}
    assert msgspec.json.decode(msgspec.json.encode(newer), type=union) == message


def test_an_unknown_type_is_a_validation_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'teleport'"):
        msgspec.json.decode(b'{"type":"teleport"}', type=control.FromWorker)


def test_no_two_messages_share_a_tag() -> None:
    tags = [msgspec.to_builtins(message)["type"] for message in (*UP, *DOWN)]
    assert len(set(tags)) == len(tags)
