"""Logits to one token. Counter-based: the key of a token depends on (seed, index) alone.

Order as in mlx-lm's sampler chain (reference behaviour): log-softmax, top-p, min-p, top-k on the untempered
distribution, then a categorical draw at temperature T.
"""

import mlx.core as mx

from worker.engine.sequence import SamplingPlan

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def token_key(seed: int, index: int) -> mx.array:
    """The random key of answer token `index`, the same on every worker and in every batch."""
    return mx.random.key((seed ^ ((index + 1) * _GOLDEN)) & _MASK)


def sample(logits: mx.array, plan: SamplingPlan, seed: int, index: int) -> mx.array:
    """logits [V] in any float dtype -> token id, uint32 scalar array. Lazy."""
    if plan.temperature == 0:
        return mx.argmax(logits, axis=-1)
    logits = logits.astype(mx.float32)
    if plan.top_k > 0 and plan.top_k < logits.shape[-1]:
        return _sample_among(logits, plan, seed, index)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if plan.top_p < 1:
        logprobs = keep_top_p(logprobs, plan.top_p)
    if plan.min_p > 0:
        logprobs = keep_min_p(logprobs, plan.min_p)
    return mx.random.categorical(logprobs * (1 / plan.temperature), key=token_key(seed, index))


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The smallest set of most likely tokens whose probability reaches `top_p`; the rest becomes -inf."""
    order = mx.argsort(-logprobs, axis=-1)
    ranked = mx.take_along_axis(logprobs, order, axis=-1)
    before = mx.cumsum(mx.exp(ranked), axis=-1) - mx.exp(ranked)
    ranked = mx.where(before < top_p, ranked, -mx.inf)
    return mx.put_along_axis(logprobs, order, ranked, axis=-1)


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Tokens at least `min_p` times as likely as the most likely one (Nguyen et al. 2024)."""
    floor = mx.max(logprobs, axis=-1, keepdims=True) + mx.log(mx.array(min_p))
    return mx.where(logprobs >= floor, logprobs, -mx.inf)


def _sample_among(logits: mx.array, plan: SamplingPlan, seed: int, index: int) -> mx.array:
    """The same result with top-k set, without sorting the vocabulary: only k tokens can be drawn."""
    k = plan.top_k
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    candidates = mx.argpartition(-logits, k - 1, axis=-1)[:k]
    order = mx.argsort(-logits[candidates], axis=-1)
    candidates = candidates[order]
    logprobs = logits[candidates] - total
    if plan.top_p < 1:
        before = mx.cumsum(mx.exp(logprobs), axis=-1) - mx.exp(logprobs)
        logprobs = mx.where(before < plan.top_p, logprobs, -mx.inf)
    if plan.min_p > 0:
        logprobs = keep_min_p(logprobs, plan.min_p)
    drawn = mx.random.categorical(logprobs * (1 / plan.temperature), key=token_key(seed, index))
    return candidates[drawn]
