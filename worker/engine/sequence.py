"""One request in flight, as the scheduler and the engine see it: ids, counters, status, budget. Pure."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from shared.wire import Curve, Hlg

PENALTY_WINDOW = 20
"""Newest tokens that a penalty looks at (mlx-lm's context size)."""


class Status(StrEnum):
    """Where a sequence is. It moves forward only."""

    WAITING = "waiting"  # not admitted
    RESTORING = "restoring"  # what of the prompt lies on disk is being read
    PREFILL = "prefill"  # part of the prompt is not in the KV cache
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling with every default resolved; what is not given is off. The fields are those of `wire.Sampling`.

    temperature 0 = greedy. `xtc_keep`: ids that XTC never takes away. `logprobs`: see `wire.GenerateRequest`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_window: int = PENALTY_WINDOW
    presence_window: int = PENALTY_WINDOW
    frequency_window: int = PENALTY_WINDOW
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_keep: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    tone: Hlg | Curve | None = None
    logprobs: int | None = None


@dataclass(eq=False)
class Sequence:
    """`prompt` is what is fed before the first new token, ids of a resumed answer included.

    `num_resumed` of the prompt's last ids belong to the answer: they count against `max_tokens` and shift the
    sampling index. `num_cached` tokens are in `caches` or scheduled to be; `generated` are the tokens
    read so far. `serial`: of the request among all of this process, where another one takes the same id later.
    `promised`: tokens that it may have in `caches` as the KV budget stands. `constraint`: a
    `worker.engine.grammar.Constraint`, as far along as `generated`.
    """

    id: str
    prompt: Seq[int]
    max_tokens: int
    sampling: SamplingPlan
    seed: int
    eos: frozenset[int]
    num_resumed: int = 0
    constraint: Any = None
    status: Status = Status.WAITING
    num_cached: int = 0
    num_reused: int = 0  # of num_cached, from the prefix cache
    num_sampled: int = 0  # tokens scheduled to be sampled, read or not
    promised: int = 0
    was_preempted: bool = False  # the second life, or a later one, of a row that had to give way
    is_told: bool = False  # of its admission its client has heard
    serial: int = field(default_factory=count(1).__next__)
    generated: list[int] = field(default_factory=list)
    caches: list[Any] | None = None
    marks: list[int] = field(default_factory=list)  # ascending: where a piece of the prompt has to end
    checkpoints: dict[int, list[Any]] = field(default_factory=dict)  # of the caches, taken at the marks
    token: tuple[Any, int] | None = (
        None  # the newest sampled token: a device array int32 [R], and its place there
    )
    pooler: Any = None  # of a text that is only read: collects its hidden states, see `worker.embed.pooling`
    adapters: tuple[str, ...] = ()  # keys of the adapters that it runs with
    namespace: str = ""  # of kept prompts: what its adapters add together; "" = the model as it is
    history: "array[int] | None" = None  # prompt and `generated`, kept where a penalty looks at them

    @property
    def num_to_prefill(self) -> int:
        return max(0, len(self.prompt) - self.num_cached)

    @property
    def next_piece(self) -> int:
        """The most tokens of the prompt that may run next: up to a mark."""
        mark = next((mark for mark in self.marks if mark > self.num_cached), len(self.prompt))
        return max(0, min(mark, len(self.prompt)) - self.num_cached)

    @property
    def num_generated(self) -> int:
        """Answer tokens, those of an earlier worker included."""
        return self.num_resumed + len(self.generated)

    @property
    def index(self) -> int:
        """Of the newest sampled token in the whole answer."""
        return self.num_resumed + self.num_sampled - 1

    @property
    def is_read(self) -> bool:
        """Whether all tokens before the newest sampled one are in `generated`; else just one is not."""
        return self.num_sampled - 1 == len(self.generated)

    def ids(self) -> "array[int]":
        """Prompt and answer as far as they have been read. Not to be changed; the next call may."""
        if self.history is None:
            self.history = array("i", self.prompt)
        self.history.extend(self.generated[len(self.history) - len(self.prompt) :])
        return self.history

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
            constraint=self.constraint,
            was_preempted=True,
            is_told=self.is_told,
            serial=self.serial,
            pooler=None if self.pooler is None else self.pooler.fresh(),
            adapters=self.adapters,
            namespace=self.namespace,
        )
