"""Logits of many rows to one token each. Counter-based: the draw of a token depends on (seed, index) alone.

Order (that of mlx-lm's chain): bias, repetition, presence and frequency penalty, grammar, log-probabilities told;
then top-p, min-p, XTC and top-k on the distribution at temperature 1, and a draw at the row's temperature.

Rows that go through the same stages go through them together, as one array with numbers of their own; no stage is
run for a row that does not need it. So a row draws the same token alone and in any company.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from shared.wire import Hlg
from worker.engine.curve import shape_curve, shape_hlg
from worker.engine.processors import (
    Recent,
    add_bias,
    keep_allowed,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
)
from worker.engine.sequence import SamplingPlan, Sequence

BAD = -1
"""Drawn where there is no token to draw: logits that are NaN or infinite, or none that is allowed."""

_GOLDEN = 0x9E3779B97F4A7C15
_XTC = 0xD1B54A32D192ED03  # the stream of numbers that decides whether XTC strikes
_MASK = (1 << 64) - 1

_vmap: Any = mx.vmap


def _draw_one(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)


def _chance_of_one(key: mx.array) -> mx.array:
    return mx.random.uniform(key=key)


_categorical: Any = _vmap(_draw_one)
_uniform: Any = _vmap(_chance_of_one)


class Told(NamedTuple):
    """Log-probabilities for the rows at `places`: of the drawn token [r], and the likeliest ids and theirs [r, n]."""

    places: list[int]
    drawn: mx.array
    ids: mx.array | None
    values: mx.array | None

    def arrays(self) -> list[mx.array]:
        return [array for array in self[1:] if isinstance(array, mx.array)]


@dataclass
class Draw:
    """`tokens` int32 [R]; `BAD` where there was none."""

    tokens: mx.array
    told: list[Told] = field(default_factory=list)

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(array for told in self.told for array in told.arrays())]


class Stages(NamedTuple):
    """What a row needs; rows with equal stages are one array."""

    bias: bool
    repetition: bool
    presence: bool
    frequency: bool
    masked: bool
    logprobs: bool
    greedy: bool
    top_p: bool = False
    min_p: bool = False
    xtc: bool = False
    top_k: int = 0  # the number itself: as many random numbers are drawn
    tone: Any = None


_PLAIN = Stages(False, False, False, False, False, False, True)


def draw(logits: mx.array, rows: Seq[Sequence], allowed: Mapping[int, np.ndarray] | None = None) -> Draw:
    """The next token of each row from `logits` [R, V] in any float dtype. Lazy.

    `allowed`: place of a row to the tokens that its grammar lets through, bool [V].
    """
    groups: dict[Stages, list[int]] = {}
    allowed = allowed or {}
    for place, row in enumerate(rows):
        key = stages(row.sampling, logits.shape[-1], masked=place in allowed)
        groups.setdefault(key, []).append(place)
    drawn = []
    told: list[Told] = []
    for key, places in groups.items():
        block = logits if len(groups) == 1 else logits[mx.array(places)]
        if key == _PLAIN:
            drawn.append(_likeliest(block))
            continue
        members = [rows[place] for place in places]
        masks = np.stack([allowed[place] for place in places]) if key.masked else None
        block = process(block.astype(mx.float32), members, key, masks)
        if key.greedy:
            is_good = _is_good(mx.max(block, axis=-1))
            tokens = mx.where(is_good, mx.argmax(block, axis=-1).astype(mx.int32), BAD)
        else:
            tokens = _drawn(block, members, key)
        if key.logprobs:
            told.append(_tell(block, tokens, places, [row.sampling for row in members]))
        drawn.append(tokens)
    if len(drawn) == 1:
        return Draw(drawn[0], told)
    order = [place for places in groups.values() for place in places]
    return Draw(mx.concatenate(drawn)[mx.array(np.argsort(order))], told)


def stages(plan: SamplingPlan, size: int, *, masked: bool = False) -> Stages:
    """What a row of that plan needs with a vocabulary of `size`."""
    always = (
        bool(plan.logit_bias),
        plan.repetition_penalty != 1,
        plan.presence_penalty != 0,
        plan.frequency_penalty != 0,
        masked,
        plan.logprobs is not None,
    )
    if plan.temperature == 0:
        return Stages(*always, greedy=True)
    top_p, top_k = plan.top_p < 1, plan.top_k if plan.top_k < size else 0
    if plan.tone is not None:
        top_p, top_k = False, 0
    return Stages(*always, False, top_p, plan.min_p > 0, plan.xtc_probability > 0, top_k, plan.tone)


def process(
    logits: mx.array, rows: Seq[Sequence], key: Stages, allowed: np.ndarray | None = None
) -> mx.array:
    """Bias, penalties and mask: `logits` float32 [R, V] -> the same shape."""
    plans = [row.sampling for row in rows]
    windows: dict[tuple[int, ...], Recent] = {}

    def recent(sizes: list[int]) -> Recent:
        known = tuple(sizes)
        if known not in windows:
            windows[known] = Recent(rows, sizes)
        return windows[known]

    if key.bias:
        logits = add_bias(logits, [plan.logit_bias for plan in plans])
    if key.repetition:
        newest = recent([plan.repetition_window for plan in plans])
        logits = penalize_repetition(logits, newest, _column(plans, "repetition_penalty"))
    if key.presence:
        newest = recent([plan.presence_window for plan in plans])
        logits = penalize_presence(logits, newest, _column(plans, "presence_penalty"))
    if key.frequency:
        newest = recent([plan.frequency_window for plan in plans])
        logits = penalize_frequency(logits, newest, _column(plans, "frequency_penalty"))
    return logits if allowed is None else keep_allowed(logits, allowed)


def token_keys(rows: Seq[Sequence], stream: int = 0) -> mx.array:
    """The random keys of the rows' newest tokens, uint32 [R, 2]: the same on every worker and in every batch."""
    keys = [(row.seed ^ ((row.index + 1) * _GOLDEN) ^ stream) & _MASK for row in rows]
    return mx.array(np.array([(key >> 32, key & 0xFFFFFFFF) for key in keys], np.uint32))


def _drawn(logits: mx.array, rows: Seq[Sequence], key: Stages) -> mx.array:
    """Truncate and draw: processed `logits` float32 [R, V] -> [R]."""
    plans = [row.sampling for row in rows]
    is_good = _is_good(mx.max(logits, axis=-1))
    logits = mx.where(is_good[:, None], logits, 0)  # the order of NaNs is nobody's
    gains = 1 / _column(plans, "temperature")
    if key.top_p or key.xtc or key.tone is not None:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    among = None
    if key.top_k and not key.xtc:  # only k tokens can be drawn: the vocabulary need not be sorted
        among = _top(logits, key.top_k)
        logits = mx.take_along_axis(logits, among, axis=-1)
        if key.top_p:
            before = mx.cumsum(mx.exp(logits), axis=-1, inclusive=False)
            logits = mx.where(before < _column(plans, "top_p")[:, None], logits, -mx.inf)
    elif key.top_p:
        logits = keep_top_p(logits, _column(plans, "top_p"))
    if key.min_p:
        logits = keep_min_p(logits, _column(plans, "min_p"))
    if key.xtc:
        logits = exclude_top(logits, plans, _uniform(token_keys(rows, _XTC)))
        if key.top_k:
            among = _top(logits, key.top_k)
            logits = mx.take_along_axis(logits, among, axis=-1)
    if key.tone is None:
        logits = logits * gains[:, None]
    else:
        logits = (
            shape_hlg(logits, key.tone, gains) if isinstance(key.tone, Hlg) else shape_curve(logits, key.tone)
        )
    tokens = _categorical(logits, token_keys(rows))
    if among is not None:
        tokens = mx.take_along_axis(among, tokens[:, None], axis=-1)[:, 0]
    return mx.where(is_good, tokens.astype(mx.int32), BAD)


def keep_top_p(logprobs: mx.array, top_p: mx.array) -> mx.array:
    """The smallest set of most likely tokens whose probability reaches `top_p` [R], and those as likely as its last;
    the rest becomes -inf. `logprobs` [R, V].
    """
    ranked = mx.sort(logprobs, axis=-1)  # ascending
    before = mx.cumsum(mx.exp(ranked), axis=-1, reverse=True, inclusive=False)
    first = mx.sum(before >= top_p[:, None], axis=-1, keepdims=True)
    least = mx.take_along_axis(ranked, mx.minimum(first, ranked.shape[-1] - 1), axis=-1)
    return mx.where(logprobs >= least, logprobs, -mx.inf)


def keep_min_p(logprobs: mx.array, min_p: mx.array) -> mx.array:
    """Tokens at least `min_p` [R] times as likely as the most likely one (Nguyen et al. 2024)."""
    floor = mx.max(logprobs, axis=-1, keepdims=True) + mx.log(min_p)[:, None]
    return mx.where(logprobs >= floor, logprobs, -mx.inf)


def exclude_top(logprobs: mx.array, plans: Seq[SamplingPlan], chances: mx.array) -> mx.array:
    """XTC: where a row's `chances` [R] come out under its probability, of the tokens above its threshold only the
    least likely is kept, and those of `xtc_keep`. Probabilities are those of what is still there.
    """
    probs = mx.softmax(logprobs, axis=-1)
    above = probs > _column(plans, "xtc_threshold")[:, None]
    least = mx.min(mx.where(above, probs, mx.inf), axis=-1, keepdims=True)
    most = max(len(plan.xtc_keep) for plan in plans)
    goes = probs > least
    if most:
        keep = np.zeros((len(plans), most), np.int32)
        for place, plan in enumerate(plans):
            keep[place] = np.resize(plan.xtc_keep, most) if plan.xtc_keep else -1
        spared = mx.array(keep)
        was = mx.take_along_axis(goes, mx.maximum(spared, 0), axis=-1)
        goes = mx.put_along_axis(goes, mx.maximum(spared, 0), was & (spared < 0), axis=-1)
    strikes = chances < _column(plans, "xtc_probability")
    return mx.where(goes & strikes[:, None], -mx.inf, logprobs)


def _likeliest(logits: mx.array) -> mx.array:
    """[R, V] -> [R]; one look at the winner tells a row without numbers.

    On the CPU a NaN anywhere wins an argmax. A GPU passes over single ones, not over a row of them, which is what a
    pass that has gone wrong gives.
    """
    tokens = mx.argmax(logits, axis=-1, keepdims=True)
    best = mx.take_along_axis(logits, tokens, axis=-1)
    return mx.where(_is_good(best), tokens.astype(mx.int32), BAD)[:, 0]


def _is_good(best: mx.array) -> mx.array:
    """Whether the greatest logit is a number."""
    return mx.isfinite(best)


def _top(logits: mx.array, count: int) -> mx.array:
    """The ids of the `count` greatest, the greatest first: [R, V] -> [R, count]."""
    count = min(count, logits.shape[-1])
    found = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(logits, found, axis=-1), axis=-1)
    return mx.take_along_axis(found, order, axis=-1)


def _tell(logits: mx.array, tokens: mx.array, places: list[int], plans: Seq[SamplingPlan]) -> Told:
    """Log-probabilities of what was drawn and of the likeliest, from processed logits [r, V]."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    logits = mx.where(mx.isfinite(total), logits, 0)
    drawn = mx.take_along_axis(logits, mx.maximum(tokens, 0)[:, None], axis=-1) - total
    count = max(plan.logprobs or 0 for plan in plans)
    if not count:
        return Told(places, drawn[:, 0], None, None)
    ids = _top(logits, count)
    return Told(places, drawn[:, 0], ids, mx.take_along_axis(logits, ids, axis=-1) - total)


def _column(plans: Seq[SamplingPlan], name: str) -> mx.array:
    return mx.array([float(getattr(plan, name)) for plan in plans])
