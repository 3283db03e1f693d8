"""Lines of a benchmark that has bars: what was measured, what it has to be, and whether it is."""

from typing import NamedTuple


class How(NamedTuple):
    """How much of it: fewer rounds, and the rows of the real worker that is killed."""

    quick: bool
    rows: int


class Line(NamedTuple):
    """`is_held` None: only told, there is no bar."""

    part: str
    what: str
    measured: str
    bar: str = ""
    is_held: bool | None = None

    @property
    def verdict(self) -> str:
        return "" if self.is_held is None else "held" if self.is_held else "MISSED"


def below(part: str, what: str, value: float, bar: float, unit: str = "", *, notes: str = "") -> Line:
    """A number that has to stay under its bar."""
    measured = f"{value:.3g}{unit}" + (f" ({notes})" if notes else "")
    return Line(part, what, measured, f"< {bar:.3g}{unit}", value < bar)


def at_least(part: str, what: str, value: float, bar: float, unit: str = "", *, notes: str = "") -> Line:
    """A number that must not fall under its bar."""
    measured = f"{value:.3g}{unit}" + (f" ({notes})" if notes else "")
    return Line(part, what, measured, f">= {bar:.3g}{unit}", value >= bar)


def all_of(part: str, what: str, good: int, total: int, *, notes: str = "") -> Line:
    """A count that has to be complete, and of something."""
    measured = f"{good} of {total}" + (f" ({notes})" if notes else "")
    return Line(part, what, measured, "all", good == total and total > 0)


def table(lines: list[Line]) -> str:
    """The lines for a terminal."""
    rows = [("part", "what", "measured", "bar", "")] + [
        (line.part, line.what, line.measured, line.bar, line.verdict) for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
