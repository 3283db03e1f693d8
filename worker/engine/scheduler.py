"""Which row runs how many tokens in the next step. Pure: no mlx, no clock, no thread.

Rules, in this order:
1. every row that decodes runs one token;
2. one row in prefill, the oldest, runs up to `prefill_chunk` tokens;
3. a waiting sequence is admitted when fewer than `max_rows` rows are active and its prompt and the first block of
   its answer fit into the KV budget beside what the active rows are promised, first come first served;
4. a row that outgrows its promise is promised another block; where there is no room the newest row is preempted
   and waits again, before all others. So rows and then waiting sequences stand in the order of their arrival, and
   the oldest row is never preempted.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from worker.engine.kv_budget import BLOCK, KvBudget, rounded
from worker.engine.sequence import Sequence, Status


@dataclass
class Step:
    """One pass of the engine: decoding rows, and at most one row with a piece of its prompt.

    `preempted`: rows that gave way just before it, each with the sequence that goes on from there later.
    """

    decode: list[Sequence] = field(default_factory=list)
    prefill: Sequence | None = None
    num_prefill: int = 0
    preempted: list[tuple[Sequence, Sequence]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode) or self.prefill is not None


class Scheduler:
    """Owns the waiting and the active sequences."""

    def __init__(self, *, max_rows: int, prefill_chunk: int, kv: KvBudget | None = None) -> None:
        if max_rows < 1 or prefill_chunk < 1:
            raise ValueError("max_rows and prefill_chunk are at least 1")
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.kv = kv or KvBudget()
        self.promised_bytes = 0  # of KV, to the active rows

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def resize(self, kv_bytes: int) -> None:
        """Another limit of the KV budget. Rows keep what they were promised."""
        self.kv = replace(self.kv, limit=kv_bytes)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free rows; returns those that moved, in order."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.active) < self.max_rows:
            sequence = self.waiting[0]
            if not self._promise(sequence, len(sequence.prompt) + BLOCK):
                break
            self.waiting.popleft()
            sequence.status = Status.PREFILL
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> Step:
        """Plan one step and book it: counters are moved as if the step had run."""
        step = Step()
        self._grow(step)
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
            self.promised_bytes -= self.kv.row_bytes(sequence.promised)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _promise(self, sequence: Sequence, tokens: int) -> bool:
        """Promise a row room for that many tokens, or for all that it can come to; False: there is none.

        A row that is alone is always promised what it needs. Whoever lets a sequence in sees to it that this is
        within the budget; a budget that has shrunk since must not keep it from its end.
        """
        tokens = rounded(min(tokens, sequence.most_tokens))
        total = self.promised_bytes - self.kv.row_bytes(sequence.promised) + self.kv.row_bytes(tokens)
        others = self.active if sequence.status is Status.WAITING else self.active[1:]
        if others and not self.kv.holds(total):
            return False
        self.promised_bytes, sequence.promised = total, tokens
        return True

    def _grow(self, step: Step) -> None:
        """Promise their next block to the rows that are about to need it."""
        for sequence in list(self.active):
            while (
                sequence.wants_decode
                and sequence.num_cached >= sequence.promised
                and not self._promise(sequence, sequence.promised + BLOCK)
            ):
                newest = self.active[-1]  # perhaps the one that grows
                self.remove(newest)
                self.waiting.appendleft(newest.again())
                step.preempted.append((newest, self.waiting[0]))
