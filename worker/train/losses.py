"""What is made small: cross entropy (sft), preference against a reference (dpo), preference by odds (orpo).

Each takes final hidden states [T, D] of the rows of a batch. With `chunk` the logits of so many tokens exist at a time
and never `[T, vocab]`: they are made, differentiated and let go chunk by chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

Head = Callable[[mx.array], mx.array]
"""Hidden states [N, D] to logits [N, V]."""


@dataclass(frozen=True)
class Scored:
    """The tokens that count: `places` [N] in the flat batch, None = all, and the token that comes next at each."""

    places: mx.array | None
    targets: mx.array

    @property
    def count(self) -> int:
        return int(self.targets.shape[0])

    def pick(self, hidden: mx.array) -> mx.array:
        return hidden if self.places is None else hidden[self.places]


def cross_entropy(head: Head, hidden: mx.array, targets: mx.array) -> mx.array:
    """-log p of each target, [N] float32."""
    logits = head(hidden).astype(mx.float32)
    wanted = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - wanted


def mean_cross_entropy(head: Head, hidden: mx.array, scored: Scored, chunk: int) -> mx.array:
    """A mean a token. In chunks its gradient is worked out on the way there, because what it is multiplied with is
    known: then each chunk's logits are made once and gone before the next ones.
    """
    picked, count = scored.pick(hidden), scored.count
    if not chunk or chunk >= count:
        return cross_entropy(head, picked, scored.targets).sum() / count
    fixed = mx.stop_gradient(picked)
    each = mx.value_and_grad(lambda x, targets: cross_entropy(head, x, targets).sum() / count)
    total = mx.array(0.0)
    slopes: list[mx.array] = []
    for begin in range(0, count, chunk):
        part = fixed[begin : begin + chunk]
        if slopes:
            [part] = mx.depends([part], [slopes[-1]])  # one after the other, whatever order mlx would like
        value, slope = each(part, scored.targets[begin : begin + chunk])
        total = total + value
        slopes.append(slope)
    slope = mx.stop_gradient(mx.concatenate(slopes))
    return mx.stop_gradient(total) + ((picked - fixed) * slope).sum()


def log_probabilities(head: Head, hidden: mx.array, scored: Scored, chunk: int) -> mx.array:
    """Of each token that counts, [N] float32; in chunks the logits are made again on the way back."""
    picked, count = scored.pick(hidden), scored.count
    if not chunk or chunk >= count:
        return -cross_entropy(head, picked, scored.targets)
    found: list[mx.array] = []
    for begin in range(0, count, chunk):
        targets = scored.targets[begin : begin + chunk]
        part = picked[begin : begin + chunk]
        if found:
            [part] = mx.depends([part], [found[-1]])
        found.append(mx.checkpoint(lambda x, targets=targets: -cross_entropy(head, x, targets))(part))
    return mx.concatenate(found)


def row_sums(values: mx.array, spans: Sequence[tuple[int, int]]) -> mx.array:
    """Of the values [N] of each row, [R]."""
    return mx.stack([values[begin:end].sum() for begin, end in spans])


def dpo(sums: mx.array, reference: mx.array, beta: float) -> tuple[mx.array, dict[str, mx.array]]:
    """Rafailov et al. 2023. `sums`: log probabilities of responses [2 P], chosen and rejected by turns; `reference`:
    the same of the model without the adapter."""
    gain = sums - reference
    margin = beta * (gain[0::2] - gain[1::2])
    return mx.logaddexp(mx.array(0.0), -margin).mean(), _preference(margin)


def orpo(
    sums: mx.array, lengths: mx.array, nll: mx.array, weight: float
) -> tuple[mx.array, dict[str, mx.array]]:
    """Hong et al. 2024. `sums` as of `dpo`, `lengths` the tokens in them; `nll`: mean cross entropy of the chosen."""
    mean = sums / lengths
    odds = mean - _log1mexp(mean)
    margin = odds[0::2] - odds[1::2]
    return nll + weight * mx.logaddexp(mx.array(0.0), -margin).mean(), _preference(margin)


def _log1mexp(x: mx.array) -> mx.array:
    """log(1 - e^x) for x < 0; one that is 0 in float32 counts as a little less."""
    x = mx.minimum(x, -1e-6)
    return mx.log(-mx.expm1(x))


def _preference(margin: mx.array) -> dict[str, mx.array]:
    margin = mx.stop_gradient(margin)
    return {"accuracy": (margin > 0).astype(mx.float32).mean(), "margin": margin.mean()}
