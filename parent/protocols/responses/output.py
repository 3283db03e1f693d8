"""The output items of a response: as they are told, and while they grow. Pure."""

from typing import Any, Literal

import msgspec

from parent.protocols.logprobs import TokenLogprob, entries
from parent.protocols.responses.custom import CustomInput
from parent.protocols.responses.request import Shown
from parent.protocols.responses.sealed import sealed
from shared import wire

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
"""Of a response."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    """The one part of a message."""

    annotations: list[Any]
    logprobs: list[TokenLogprob]
    text: str


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Thinking, as it was."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    """Thinking, where a summary of it was asked for."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """Text of the answer."""

    id: str
    status: ItemStatus
    role: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """What was thought."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    """A call; `arguments` is JSON as text."""

    id: str
    status: ItemStatus
    arguments: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, frozen=True, tag="custom_tool_call"):
    """A call of a tool that takes free text."""

    id: str
    status: ItemStatus
    call_id: str
    input: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_PREFIXES: dict[Kind, str] = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"
}  # fmt: skip


class Growing:
    """An output item while it is written. Its id tells the response that it is of; see `responses_items.owner_of`."""

    def __init__(
        self, request: str, index: int, kind: Kind, shown: Shown, call_id: str = "", name: str = ""
    ) -> None:
        self.id = f"{_PREFIXES[kind]}_{request}{index}"
        self.index = index
        self.kind = kind
        self._shown = shown
        self._call_id = call_id
        self._namespace: str | msgspec.UnsetType
        self._namespace, self._name = shown.namespaced.get(name, (msgspec.UNSET, name))
        self._pieces: list[str] = []
        self._logprobs: list[wire.Logprob] = []
        self._input = CustomInput() if kind == "custom_tool_call" else None

    def add(self, text: str, logprobs: list[wire.Logprob] | None = None) -> str:
        """More of it; what that adds to what is shown."""
        if self._input is not None:
            text = self._input.feed(text)
        self._pieces.append(text)
        self._logprobs += logprobs or ()
        return text

    def end(self) -> str:
        """No more of it; what that adds."""
        rest = self._input.end() if self._input is not None else ""
        self._pieces.append(rest)
        return rest

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def part(self) -> OutputText:
        """Of a message."""
        return OutputText([], entries(self._logprobs), self.text)

    def item(self, status: ItemStatus, *, is_new: bool = False) -> Item:
        """As it is now; `is_new`: before any of it."""
        if self.kind == "message":
            return MessageItem(self.id, status, "assistant", [] if is_new else [self.part])
        if self.kind == "reasoning":
            is_summary = self._shown.summary is not None
            summary = [SummaryText(self.text)] if is_summary and not is_new else []
            content = [ReasoningText(self.text)] if not is_summary and not is_new else []
            kept = sealed(self.text) if self._shown.seals and not is_new else None
            return ReasoningItem(self.id, summary, content, kept, status)
        if self.kind == "function_call":
            return FunctionCallItem(self.id, status, self.text, self._call_id, self._name, self._namespace)
        return CustomCallItem(self.id, status, self._call_id, self.text, self._name, self._namespace)


def kind_of_call(name: str, shown: Shown) -> Kind:
    return "custom_tool_call" if name in shown.custom else "function_call"


def items_of(grown: list[Growing], status: Status) -> list[Item]:
    """The output of a response of this status: what it was cut off in is the last one."""
    is_whole = status == "completed"
    return [each.item("completed" if is_whole or each is not grown[-1] else "incomplete") for each in grown]
