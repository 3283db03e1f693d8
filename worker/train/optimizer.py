"""AdamW over flat dicts of arrays (Loshchilov and Hutter 2019), as MLX has it: moments without bias correction."""

import math
from collections.abc import Mapping

import mlx.core as mx

from shared.lab import Finetune
from worker.train.adapter import Arrays

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
RATES = {"sft": 2e-4, "dpo": 5e-5, "orpo": 1e-5}


def moments_of(arrays: Mapping[str, mx.array]) -> tuple[Arrays, Arrays]:
    """Before the first step."""
    return {name: mx.zeros_like(one) for name, one in arrays.items()}, {
        name: mx.zeros_like(one) for name, one in arrays.items()
    }


def learning_rate(spec: Finetune, step: int) -> float:
    """Of step 1 to `spec.iters`: up in a line over the warm-up, then constant, or down to 0 behind the last step."""
    rate = RATES[spec.method] if spec.learning_rate is None else spec.learning_rate
    if step <= spec.warmup_iters:
        return rate * step / spec.warmup_iters
    past = (step - 1 - spec.warmup_iters) / max(1, spec.iters - spec.warmup_iters)
    if spec.lr_schedule == "linear":
        return rate * (1 - past)
    if spec.lr_schedule == "cosine":
        return rate * 0.5 * (1 + math.cos(math.pi * past))
    return rate


def update(
    arrays: Arrays, grads: Arrays, moments: tuple[Arrays, Arrays], spec: Finetune, rate: float
) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    """One step. B learns `lora_plus_ratio` times as fast (LoRA+, Hayou et al. 2024); magnitudes do not decay."""
    new: Arrays = {}
    first: Arrays = {}
    second: Arrays = {}
    for name, array in arrays.items():
        grad = grads[name]
        leaf = name.rpartition(".")[2]
        own = rate * spec.lora_plus_ratio if leaf == "lora_b" else rate
        decay = 0.0 if leaf == "m" else spec.weight_decay
        first[name] = BETA1 * moments[0][name] + (1 - BETA1) * grad
        second[name] = BETA2 * moments[1][name] + (1 - BETA2) * mx.square(grad)
        kept = array * (1 - own * decay) if decay else array
        new[name] = kept - own * first[name] / (mx.sqrt(second[name]) + EPS)
    return new, (first, second)


def norm_of(grads: Mapping[str, mx.array]) -> mx.array:
    """Over all arrays together."""
    return mx.sqrt(mx.stack([mx.square(one).sum() for one in grads.values()]).sum())


def clip(grads: Arrays, norm: mx.array, most: float) -> Arrays:
    """Shorten the gradient to length `most` where it is longer; 0 = never."""
    if not most:
        return grads
    factor = mx.minimum(most / (norm + 1e-6), 1.0)
    return {name: one * factor for name, one in grads.items()}
