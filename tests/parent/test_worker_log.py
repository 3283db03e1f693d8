"""What a worker logs is in the server's log: every line whole and under its worker's name, and a flood is bounded."""

import asyncio
import io
import json
import logging
import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.workers.process import RING_LINES, Process
from parent.workers.relay import MAX_LINE, MOST_LINES, WINDOW_S, Lines, Relay
from shared.logs import JsonLines

IDS = {"model": "org/m", "pid": 7}


def line(event: str, level: str = "info", **fields: object) -> bytes:
    return json.dumps(
        {"ts": 1.5, "level": level, "logger": "cache", "event": event, **fields}, separators=(",", ":")
    ).encode()


def told(caplog: pytest.LogCaptureFixture) -> list[dict]:
    """What the server's log has, as the JSON lines it is written in."""
    return [json.loads(JsonLines().format(record)) for record in caplog.records]


@pytest.fixture(autouse=True)
def everything(caplog):
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_line_keeps_its_level_and_fields_and_gets_the_ids_of_its_worker(caplog, level):
    relay = Relay(IDS)
    assert relay.take(line("store.damaged", level, file="/a b", reason="é", model="me", pid=1), 0)
    [found] = told(caplog)
    assert found.pop("ts") > 1.5
    assert found == {
        "level": level,
        "logger": "worker.cache",
        "event": "store.damaged",
        "file": "/a b",
        "reason": "é",
        **IDS,
    }


def test_what_a_worker_itself_formats_is_a_line_of_its_log(caplog):
    log = logging.getLogger("engine")
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    log.propagate = False
    try:
        raise ValueError("a\nb % c")
    except ValueError:
        log.exception("engine.fault %s", "100%", extra={"fields": {"n": 1}})
    finally:
        log.propagate = True
        log.removeHandler(handler)
    (written,) = handler.stream.getvalue().splitlines()
    assert Relay(IDS).take(written.encode(), 0)
    [found] = told(caplog)
    assert (found["event"], found["level"], found["n"]) == ("engine.fault 100%", "error", 1)
    assert found["error"].startswith("Traceback")
    assert found["error"].endswith("ValueError: a\nb % c")


@pytest.mark.parametrize(
    "printed",
    [b"", b"Fatal Python error: Aborted", b'{"event":"x"}', b"[1]", b'  {"ts":1.5,"level":"info"', b"\xff"],
)
def test_what_is_printed_otherwise_is_not_said_again(caplog, printed):
    assert not Relay(IDS).take(printed, 0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (line("x")[:-3], "truncated"),
        (line("x", reason="y" * MAX_LINE), "longer than 65536 bytes"),
        (line("x").replace(b'"logger"', b'"longer"'), "logger"),
        (line("x").replace(b"cache", b"c\xff"), "UTF-8"),
    ],
)
def test_a_line_that_cannot_be_taken_is_told_with_its_beginning(caplog, broken, reason):
    assert Relay(IDS).take(broken, 0)
    [found] = told(caplog)
    assert found["event"] == "worker.log_line"
    assert reason in found["reason"]
    assert found["begins"].startswith('{"ts":1.5,"level":"info","')
    assert len(found["begins"]) <= 200


def test_a_flood_is_bounded_by_level_and_what_was_left_out_is_counted(caplog):
    relay = Relay(IDS)
    for n in range(MOST_LINES + 50):
        relay.take(line("store.discarded", n=n), now=1.0 + n / 1000)
    relay.take(line("engine.row_failed", "error"), now=2.0)
    events = [found["event"] for found in told(caplog)]
    assert events == ["store.discarded"] * MOST_LINES + ["worker.log_floods", "engine.row_failed"]
    caplog.clear()
    relay.take(line("store.discarded"), now=1.0 + WINDOW_S)
    dropped, found = told(caplog)
    assert (dropped["event"], dropped["lines"], dropped["model"]) == ("worker.log_dropped", 50, "org/m")
    assert found["event"] == "store.discarded"
    caplog.clear()
    relay.tell_dropped()
    assert not caplog.records


def test_what_is_secret_is_cleaned_out_of_every_text(caplog):
    relay = Relay({"job": "j"}, lambda text: text.replace("s3cret", "…"))
    relay.take(line("get s3cret", url='"s3cret"', more=["s3cret"], n=3), 0)
    relay.take(line("get s3cret")[:-2], 0)
    assert "s3cret" not in caplog.text + str(told(caplog))
    assert told(caplog)[0]["url"] == '"…"'


@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([line("a"), line("b", x="\n é"), b"x" * 70_000])),
    st.lists(st.integers(0, 100_000)),
)
def test_any_cut_of_any_output_gives_the_same_lines(parts, cuts):
    output = b"\n".join(parts)
    at = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    lines = Lines()
    found = [each for begin, end in pairwise(at) for each in lines.feed(output[begin:end])]
    whole = [each[: MAX_LINE + 1] for each in output.split(b"\n")]
    assert [*found, *lines.end()] == (whole if whole[-1] else whole[:-1])


def test_a_process_keeps_its_last_lines_and_has_its_log_said_again(caplog):
    async def main() -> None:
        output, theirs = os.pipe()
        process = Process(7, output, lambda: 0, Relay(IDS))
        printed = [b"Fatal Python error: Aborted", *(line("x", n=n) for n in range(MOST_LINES + 9)), b"end"]
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(b"\n".join(printed))
        await process.output_ended(20)
        assert list(process.lines) == [each.decode() for each in printed][-RING_LINES:]
        assert process.tail()[-1] == "end"

    asyncio.run(main())
    events = [(found["event"], found.get("lines")) for found in told(caplog) if "logger" in found]
    events = [found for found in events if found[0].startswith(("x", "worker."))]
    assert events[:MOST_LINES] == [("x", None)] * MOST_LINES
    assert events[MOST_LINES:] == [("worker.log_floods", MOST_LINES), ("worker.log_dropped", 9)]
