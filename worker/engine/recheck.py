"""For whoever doubts the prefix cache: is a prompt taken up from it what the prompt is when it is run whole?

Costs a whole prefill a request, so it is off unless `check_prefix` is set.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from shared.logs import event
from worker.layers.batch import solo

log = logging.getLogger("engine")

TOLERANCE = 2e-2
"""Of logits: sums in another order, and quantized KV that fell on the other side of a step, stay below."""


def recheck(
    model: Any, request_id: str, prompt: Sequence[int], caches: list[Any], reused: int, chunk: int
) -> float:
    """The greatest difference of the logits after `prompt`: from `caches`, which hold `reused` of it, and from none.

    A line in the log for every request, a warning where it is above `TOLERANCE`. Waits for both.
    """
    warm = _logits(model, prompt, reused, [cache.clone() for cache in caches], chunk)
    cold = _logits(model, prompt, 0, model.make_caches(len(prompt)), chunk)
    difference = cast(float, mx.max(mx.abs(warm - cold)).item())
    level = logging.INFO if difference <= TOLERANCE else logging.WARNING
    event(
        log,
        "prefix.checked",
        level=level,
        request_id=request_id,
        prompt_tokens=len(prompt),
        reused=reused,
        difference=difference,
    )
    return difference


def _logits(model: Any, prompt: Sequence[int], begin: int, caches: list[Any], chunk: int) -> mx.array:
    """Of the token after `prompt` [V], float32; tokens before `begin` are in `caches`."""
    while True:
        end = min(begin + chunk, len(prompt))
        hidden = model(solo(mx.array(list(prompt[begin:end]), dtype=mx.int32), caches))
        if end == len(prompt):
            logits: mx.array = model.head(hidden[-1:])[0]
            return logits.astype(mx.float32)
        mx.eval([array for cache in caches for array in cache.arrays()])
        begin = end
