"""Which row runs how many tokens in the next step. Pure: no mlx, no clock, no thread.

Rules, in this order:
1. every row that decodes runs one token;
2. one row in prefill, the oldest, runs up to `prefill_chunk` tokens;
3. a waiting sequence is admitted when fewer than `max_rows` rows are active, first come first served.
"""

from collections import deque
from dataclasses import dataclass, field

from worker.engine.sequence import Sequence, Status


@dataclass
class Step:
    """One pass of the engine: decoding rows, and at most one row with a piece of its prompt."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: Sequence | None = None
    num_prefill: int = 0

    def __bool__(self) -> bool:
        return bool(self.decode) or self.prefill is not None


class Scheduler:
    """Owns the waiting and the active sequences."""

    def __init__(self, *, max_rows: int, prefill_chunk: int) -> None:
        if max_rows < 1 or prefill_chunk < 1:
            raise ValueError("max_rows and prefill_chunk are at least 1")
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free rows; returns those that moved, in order."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.active) < self.max_rows:
            sequence = self.waiting.popleft()
            sequence.status = Status.PREFILL
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> Step:
        """Plan one step and book it: counters are moved as if the step had run."""
        step = Step()
        for sequence in self.active:
            if sequence.wants_decode:
                sequence.num_cached += 1
                sequence.num_sampled += 1
                step.decode.append(sequence)
        oldest = next((s for s in self.active if s.status is Status.PREFILL), None)
        if oldest is not None:
            step.prefill = oldest
            step.num_prefill = min(self.prefill_chunk, oldest.num_to_prefill)
            oldest.num_cached += step.num_prefill
            if oldest.num_to_prefill == 0:
                oldest.status = Status.DECODE
                oldest.num_sampled += 1
        return step

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; removing it twice is harmless."""
        sequence.status = Status.FINISHED
        if sequence in self.active:
            self.active.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
