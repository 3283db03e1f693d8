"""Rows as the sampler sees them in mid-answer, for its tests."""

import mlx.core as mx

from worker.engine.sequence import SamplingPlan, Sequence


def row(
    plan: SamplingPlan,
    *,
    prompt: list[int] | None = None,
    answer: list[int] | None = None,
    unread: bool = False,
    seed: int = 0,
    index: int = 0,
) -> Sequence:
    """About to get a token. `unread`: the last of `answer` is on the device only; `index`: tokens resumed before."""
    made = Sequence("r", prompt or [0], 1 << 20, plan, seed, frozenset(), num_resumed=index)
    answer = answer or []
    made.generated = answer[: len(answer) - unread]
    made.num_sampled = len(answer) + 1
    if answer:
        made.token = (mx.array([7, answer[-1]], dtype=mx.int32), 1)
    return made
