"""What commands have in common at a terminal: tables, questions, a progress bar."""

import sys
import time

from shared.errors import ErrorCode, refuse
from shared.units import format_bytes

_WIDTH = 28
_LABEL = 12
_FINE = "█░"


def is_interactive() -> bool:
    """A person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask; anything but yes is a refusal. With `yes` nothing is asked. Needs a terminal otherwise."""
    if yes:
        return
    if not is_interactive():
        raise refuse(ErrorCode.INVALID_REQUEST, f"{question} Nobody is here to ask: give --yes")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise refuse(ErrorCode.FORBIDDEN, "left as it was")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as they need to be; the last one is not padded."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


class Progress:
    """A bar on a terminal, a line at each tenth elsewhere; on stderr, so that stdout stays data."""

    def __init__(self) -> None:
        self._stage = ""
        self._tenth = -1
        self._drawn_at = 0.0
        self._bar = sys.stderr.isatty()
        self._marks = _FINE if _can_show(_FINE) else "#."

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage, self._tenth, self._drawn_at = stage, -1, 0.0
        share = min(done / total, 1.0) if total else 0.0
        if self._bar:
            self._draw(share, done, total)
        elif int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            print(f"{stage:<{_LABEL}} {self._tenth * 10:3d} %", file=sys.stderr, flush=True)

    def _draw(self, share: float, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn_at < 0.05 and done < total:
            return
        self._drawn_at = now
        full = round(share * _WIDTH)
        # A job counts tensors, a download bytes; nobody needs to read "12 B of 272 B".
        amount = f"{format_bytes(done)} of {format_bytes(total)}" if total > 100_000 else f"{done} of {total}"
        bar = self._marks[0] * full + self._marks[1] * (_WIDTH - full)
        print(
            f"\r{self._stage:<{_LABEL}} {bar} {share:4.0%}  {amount}\x1b[K",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """End the line of the bar, if one is on the screen."""
        if self._bar and self._stage:
            print(file=sys.stderr)
        self._stage = ""
