"""One request in flight, as the scheduler and the engine see it: ids, counters, status, budget. Pure."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Where a sequence is. It moves forward only."""

    WAITING = "waiting"  # not admitted
    PREFILL = "prefill"  # part of the prompt is not in the KV cache
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling with every default resolved. temperature 0 = greedy; top_p 1, top_k 0, min_p 0 = off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(eq=False)
class Sequence:
    """`prompt` is what is fed before the first new token, ids of a resumed answer included.

    `num_resumed` of the prompt's last ids belong to the answer: they count against `max_tokens` and shift the
    sampling index. `num_cached` tokens are in `caches` or scheduled to be; `generated` are the tokens
    read so far. `promised`: tokens that it may have in `caches` as the KV budget stands.
    """

    id: str
    prompt: Seq[int]
    max_tokens: int
    sampling: SamplingPlan
    seed: int
    eos: frozenset[int]
    num_resumed: int = 0
    status: Status = Status.WAITING
    num_cached: int = 0
    num_reused: int = 0  # of num_cached, from the prefix cache
    num_sampled: int = 0  # tokens scheduled to be sampled, read or not
    promised: int = 0
    was_preempted: bool = False  # the second life, or a later one, of a row that had to give way
    generated: list[int] = field(default_factory=list)
    caches: list[Any] | None = None
    token: Any = None  # the device array of the newest sampled token, int32 [1]

    @property
    def num_to_prefill(self) -> int:
        return max(0, len(self.prompt) - self.num_cached)

    @property
    def num_generated(self) -> int:
        """Answer tokens, those of an earlier worker included."""
        return self.num_resumed + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """Of prompt and answer, when it runs to its end."""
        return len(self.prompt) - self.num_resumed + self.max_tokens

    @property
    def wants_decode(self) -> bool:
        """Another token may be sampled without going past `max_tokens`."""
        return self.status is Status.DECODE and self.num_resumed + self.num_sampled < self.max_tokens

    @property
    def cached_ids(self) -> list[int]:
        """The ids whose keys and values are in `caches` (as far as they have been read)."""
        return [*self.prompt, *self.generated][: self.num_cached]

    def again(self) -> "Sequence":
        """The same request from here on, as one that is resumed. A token drawn but not read is drawn once more."""
        return Sequence(
            self.id,
            [*self.prompt, *self.generated],
            self.max_tokens,
            self.sampling,
            self.seed,
            self.eos,
            num_resumed=self.num_generated,
            was_preempted=True,
        )
