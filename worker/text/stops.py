"""Stop strings on decoded text, with hold-back: nothing that may be part of a match leaves early.

The match that is complete first wins (of two that end together, the one that began first), so the result
does not depend on how the text was cut into pieces. Nothing of the match is given out.
"""

from collections.abc import Sequence

from worker.text.holdback import overlap


class StopMatcher:
    """One stream of text. `feed` gives what may leave; `matched` is the stop string once one fired."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return held[:at]
        keep = max(overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The end of the text: a beginning that never completed is delivered."""
        held, self._held = self._held, ""
        return held
