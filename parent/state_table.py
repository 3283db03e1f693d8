"""A state table as Markdown, for the architecture page. Pure."""

from collections.abc import Iterable

Line = tuple[str, str, str, str, str]
"""From, event, guard, to, effects."""


def markdown(rows: Iterable[Line]) -> str:
    """A state is named once, on its first line; so is an event of several guards."""
    lines = ["| from | event | guard | to | effects |", "|---|---|---|---|---|"]
    before: tuple[str, str] = ("", "")
    for state, event, guard, target, effects in rows:
        source = f"**{state}**" if state != before[0] else ""
        shown = event if (state, event) != before else ""
        before = (state, event)
        lines.append(f"| {source} | {shown} | {guard} | {target} | {effects} |")
    return "\n".join(lines)
