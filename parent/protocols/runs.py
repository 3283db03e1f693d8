"""A batch of events with neighbours of one kind joined: what goes out as one frame each. Pure."""

from msgspec.structs import replace

from shared import wire


def runs(events: list[wire.Event]) -> list[wire.Content]:
    """Text, thinking and pieces of calls in their order; none is empty. Token ids are left out."""
    joined: list[wire.Content] = []
    for event in events:
        if isinstance(event, wire.ToolCall):
            if event.name or event.arguments:
                _append_call(joined, event)
        elif isinstance(event, wire.Text):
            if event.text or event.logprobs:
                _append(joined, event)
        elif isinstance(event, wire.Reasoning) and event.text:
            _append(joined, event)
    return joined


def _append(joined: list[wire.Content], event: wire.Text | wire.Reasoning) -> None:
    if joined and type(last := joined[-1]) is type(event):
        assert isinstance(last, (wire.Text, wire.Reasoning))
        joined[-1] = replace(last, text=last.text + event.text, logprobs=last.logprobs + event.logprobs)
    else:
        joined.append(event)


def _append_call(joined: list[wire.Content], event: wire.ToolCall) -> None:
    if joined and isinstance(last := joined[-1], wire.ToolCall) and last.index == event.index:
        joined[-1] = replace(last, arguments=last.arguments + event.arguments)
    else:
        joined.append(event)
