"""Which row runs how many tokens in the next step. Pure: no mlx, no clock, no thread.

Rules, in this order:
1. every row that decodes runs one token;
2. rows in prefill share the step's budget of prompt tokens. The oldest may always have half of it; then short
   prompts are run to their end, the shortest first; what is left over goes to the others by age. So many short
   prompts run together and do not wait for a long one, which goes on all the same;
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
    """One pass of the engine: decoding rows, and rows with a piece of their prompt, each with its length.

    `preempted`: rows that gave way just before it, each with the sequence that goes on from there later.
    """

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[tuple[Sequence, Sequence]] = field(default_factory=list)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens in this step."""
        return sum(count for _, count in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


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

    @property
    def num_decode(self) -> int:
        """Rows that would run a token of their answer next."""
        return sum(sequence.wants_decode for sequence in self.active)

    @property
    def num_prefill(self) -> int:
        """Rows that have some of their prompt to run."""
        return sum(sequence.status is Status.PREFILL for sequence in self.active)

    def schedule(self, budget: int | None = None) -> Step:
        """Plan one step and book it: counters are moved as if the step had run.

        `budget`: the most prompt tokens in it, `prefill_chunk` where none is given.
        """
        step = Step()
        self._grow(step)
        for sequence in self.active:
            if sequence.wants_decode:
                sequence.num_cached += 1
                sequence.num_sampled += 1
                step.decode.append(sequence)
        in_prefill = [s for s in self.active if s.status is Status.PREFILL]
        limit = self.prefill_chunk if budget is None else min(budget, self.prefill_chunk)
        for place, count in shares([s.next_piece for s in in_prefill], limit):
            row = in_prefill[place]
            row.num_cached += count
            step.prefill.append((row, count))
            if row.num_to_prefill == 0:
                row.status = Status.DECODE
                row.num_sampled += 1
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


def shares(left: list[int], budget: int) -> list[tuple[int, int]]:
    """Who of those with `left` tokens to prefill, the oldest first, gets how many of `budget` -> (place, count)."""
    given = [0] * len(left)

    def give(place: int, count: int) -> None:
        nonlocal budget
        given[place] += count
        budget -= count

    if left:
        give(0, min(left[0], -(-budget // 2)))
    for place in sorted(range(1, len(left)), key=lambda place: left[place]):
        if left[place] <= budget:
            give(place, left[place])
    for place, wanted in enumerate(left):
        give(place, min(wanted - given[place], budget))
    return [(place, count) for place, count in enumerate(given) if count]
