"""A response as server-sent events, each with the next `sequence_number`. Pure.

`response.created` (before prefill; `response.queued` after it where it runs in the background), `response.in_progress`;
for each output item `output_item.added`, its parts and deltas, their `done`, `output_item.done`; at last
`response.completed`, `.incomplete` or `.failed` with the whole response. Items follow each other, but for a call: it
stays open while text comes after it, until the next call or the end, as its arguments may go on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from parent.protocols import sse
from parent.protocols.base import Meta
from parent.protocols.logprobs import entries
from parent.protocols.openai import fields as openai_fields
from parent.protocols.responses.object import Response, begun, ended, error_of
from parent.protocols.responses.output import (
    Growing,
    Kind,
    OutputText,
    ReasoningText,
    Status,
    SummaryText,
    items_of,
    kind_of_call,
)
from parent.protocols.responses.request import asked_of
from parent.protocols.runs import runs
from shared import wire
from shared.errors import Failure

_MARK = 1 << 53  # stands for a sequence number in a frame that is made beforehand


Ready = tuple[type[wire.Text | wire.Reasoning], bytes, bytes, bytes]
"""Deltas of the open item are the same but for number and text: its kind, and what stands around the two."""


class ResponseStream:
    """Encodes one response. `clock` gives seconds since the epoch; without it all is at the time of the request."""

    def __init__(self, meta: Meta, clock: Callable[[], int] | None = None) -> None:
        self._meta = meta
        self._clock = clock or (lambda: meta.created)
        self._shown = asked_of(meta).shown
        self._response = begun(meta)
        self._sequence = 0
        self._is_created = self._is_running = False
        self._items: list[Growing] = []
        self._open: Growing | None = None  # text or thinking that may go on
        self._call: Growing | None = None
        self._ready: Ready | None = None  # the token path, where it may be taken
        self._last = b""
        self._final: Response | None = None

    # ------------------------------------------------------------ what the pipeline calls

    def queue(self) -> bytes:
        """The first frames of a response that waits in the background."""
        self._response = replace(self._response, status="queued")
        return self._create() + self._told("response.queued")

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """One delta per run of text, thinking or a call in the batch."""
        if self._ready is not None and len(events) == 1:  # nearly always
            only = events[0]
            kind, before, between, after = self._ready
            if type(only) is kind and only.text:
                assert self._open is not None
                self._open.add(only.text)
                number = b"%d" % self._sequence
                self._sequence += 1
                return b"".join((before, number, between, sse.encode(only.text), after))
        frames = [self._begin(), *sse.prefill_comments(events)]
        for run in runs(events):
            if isinstance(run, wire.ToolCall):
                frames.append(self._called(run))
            elif isinstance(run, wire.Text):
                frames += [self._opened("message"), self._text(run)]
            else:
                frames += [self._opened("reasoning"), self._thought(run.text)]
        return b"".join(frames)

    def end(self, finish: wire.Finish) -> Response:
        """The whole response, before `finish` tells it."""
        frames = [self._begin()]
        if not self._items:
            frames.append(self._opened("message"))
        is_whole = finish.reason in ("stop", "tool_calls")
        frames += [self._closed(item, is_whole=is_whole) for item in (self._call, self._open) if item]
        self._call = self._open = self._ready = None
        self._last = b"".join(frames)
        self._final = ended(self._response, finish, self._items, self._clock())
        return self._final

    def not_stored(self) -> None:
        """What is still told says that it is not stored."""
        self._response = replace(self._response, store=False)
        if self._final is not None:
            self._final = replace(self._final, store=False)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        response = self._final or self.end(finish)
        return self._last + self._whole(response)

    def fail(self, failure: Failure) -> bytes:
        """As the response where there is one, else as an error."""
        if not self._is_created:
            told = openai_fields.error_frame(of_input(failure)).error
            return self._frame("error", code=told.code, message=told.message, param=told.param)
        return self._whole(self.stopped("failed", failure))

    def stopped(self, status: Status, failure: Failure | None = None) -> Response:
        """The response with what there is of it: on its way, failed or cancelled."""
        error = error_of(failure) if failure is not None else None
        output = items_of(self._items, "incomplete")
        is_stored = self._response.store and (error is None or self._shown.background)
        return replace(self._response, status=status, error=error, output=output, store=is_stored)

    def cancel(self) -> bytes:
        """The last frame of a cancelled response."""
        return self._whole(self.stopped("cancelled"))

    @property
    def snapshot(self) -> Response:
        """As it is now."""
        return self._final or self.stopped(self._response.status)

    # ------------------------------------------------------------ the response

    def _create(self) -> bytes:
        self._is_created = True
        return self._told("response.created")

    def _begin(self) -> bytes:
        if self._is_running:
            return b""
        self._is_running = True
        created = b"" if self._is_created else self._create()
        self._response = replace(self._response, status="in_progress")
        return created + self._told("response.in_progress")

    def _told(self, name: str) -> bytes:
        return self._frame(name, response=self._response)

    def _whole(self, response: Response) -> bytes:
        names: dict[Status, str] = {"completed": "response.completed", "incomplete": "response.incomplete"}
        return self._frame(names.get(response.status, "response.failed"), response=response)

    # ------------------------------------------------------------ items

    def _opened(self, kind: Kind) -> bytes:
        """The frames that make text or thinking the open item."""
        if self._open is not None and self._open.kind == kind:
            return b""
        frames = self._close_open()
        self._open = item = Growing(self._meta.id, len(self._items), kind, self._shown)
        frames += self._added(item)
        if kind == "message":
            frames += self._part(item, "response.content_part.added", OutputText([], [], ""))
        elif self._shown.summary:
            frames += self._part(item, "response.reasoning_summary_part.added", SummaryText(""))
        else:
            frames += self._part(item, "response.content_part.added", ReasoningText(""))
        if kind == "reasoning" or self._meta.asked.logprobs is None:
            self._ready = self._around(item)
        return frames

    def _called(self, run: wire.ToolCall) -> bytes:
        frames = b""
        if run.name:
            frames = self._close_open()
            if self._call is not None:
                frames += self._closed(self._call)
            kind = kind_of_call(run.name, self._shown)
            self._call = Growing(self._meta.id, len(self._items), kind, self._shown, run.id, run.name)
            frames += self._added(self._call)
        assert self._call is not None, "a call begins with its name"
        return frames + self._argued(self._call, self._call.add(run.arguments))

    def _close_open(self) -> bytes:
        item, self._open, self._ready = self._open, None, None
        return b"" if item is None else self._closed(item)

    def _added(self, item: Growing) -> bytes:
        self._items.append(item)
        fresh = item.item("in_progress", is_new=True)
        return self._frame("response.output_item.added", output_index=item.index, item=fresh)

    def _closed(self, item: Growing, *, is_whole: bool = True) -> bytes:
        frames = [self._argued(item, item.end())]
        if item.kind == "message":
            part = item.part
            frames += [
                self._of(
                    item, "response.output_text.done", content_index=0, text=part.text, logprobs=part.logprobs
                ),
                self._part(item, "response.content_part.done", part),
            ]
        elif item.kind == "reasoning" and self._shown.summary:
            frames += [
                self._of(item, "response.reasoning_summary_text.done", summary_index=0, text=item.text),
                self._part(item, "response.reasoning_summary_part.done", SummaryText(item.text)),
            ]
        elif item.kind == "reasoning":
            frames += [
                self._of(item, "response.reasoning_text.done", content_index=0, text=item.text),
                self._part(item, "response.content_part.done", ReasoningText(item.text)),
            ]
        elif item.kind == "function_call":
            frames.append(self._of(item, "response.function_call_arguments.done", arguments=item.text))
        else:
            frames.append(self._of(item, "response.custom_tool_call_input.done", input=item.text))
        is_done = is_whole or item is not self._items[-1]
        status: Any = "completed" if is_done else "incomplete"
        done = item.item(status)
        frames.append(self._frame("response.output_item.done", output_index=item.index, item=done))
        return b"".join(frames)

    # ------------------------------------------------------------ deltas

    def _text(self, run: wire.Text) -> bytes:
        assert self._open is not None
        self._open.add(run.text, run.logprobs)
        return self._delta(self._open, run.text, run.logprobs)

    def _thought(self, text: str) -> bytes:
        assert self._open is not None
        self._open.add(text)
        return self._delta(self._open, text)

    def _delta(self, item: Growing, text: str, logprobs: Sequence[wire.Logprob] = ()) -> bytes:
        if item.kind == "message":
            told = entries(logprobs)
            return self._of(item, "response.output_text.delta", content_index=0, delta=text, logprobs=told)
        if self._shown.summary:
            return self._of(item, "response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return self._of(item, "response.reasoning_text.delta", content_index=0, delta=text)

    def _argued(self, call: Growing, delta: str) -> bytes:
        if not delta:
            return b""
        if call.kind == "function_call":
            return self._of(call, "response.function_call_arguments.delta", delta=delta)
        return self._of(call, "response.custom_tool_call_input.delta", delta=delta)

    def _around(self, item: Growing) -> Ready:
        """Encoded once for all deltas of the item."""
        sequence, self._sequence = self._sequence, _MARK
        before, rest = self._delta(item, sse.MARK).split(b"%d" % _MARK)
        self._sequence = sequence
        between, after = sse.around(rest)
        return wire.Text if item.kind == "message" else wire.Reasoning, before, between, after

    # ------------------------------------------------------------ frames

    def _part(self, item: Growing, name: str, part: msgspec.Struct) -> bytes:
        place = "summary_index" if isinstance(part, SummaryText) else "content_index"
        return self._of(item, name, **{place: 0}, part=part)

    def _of(self, item: Growing, name: str, **fields: Any) -> bytes:
        return self._frame(name, item_id=item.id, output_index=item.index, **fields)

    def _frame(self, name: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return sse.named(name, {"type": name, "sequence_number": number, **fields})


def of_input(failure: Failure) -> Failure:
    """The failure with the name that its field has here: what a model reads as messages came as `input`."""
    param = failure.param or ""
    if param != "messages" and not param.startswith("messages["):
        return failure
    return replace(failure, param="input")


def error(failure: Failure, request_id: str = "") -> tuple[int, bytes]:
    """Status and body of a failure before any header has left."""
    return openai_fields.error(of_input(failure), request_id)
