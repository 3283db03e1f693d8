"""What a request asks of sampling, checked and with every default filled in. Pure."""

import math
from collections.abc import Collection

from shared.errors import ErrorCode, Refused, refuse
from shared.wire import Curve, Hlg, Sampling
from worker.engine.sequence import PENALTY_WINDOW, SamplingPlan

DEFAULT_TEMPERATURE = 0.7
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6
MAX_BIASES = 300
MAX_LOGPROBS = 20

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_window": (0, math.inf),
    "presence_window": (0, math.inf),
    "frequency_window": (0, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
}


def check_sampling(asked: Sampling, vocab_size: int) -> None:
    """Raises `Refused` (invalid_request, `param` names the field)."""
    for name, (low, high) in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            wanted = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
            raise _refused(f"{name} is {value}; it has to be {wanted}", name)
    if asked.logit_bias:
        _check_bias(asked.logit_bias, vocab_size)
    if isinstance(asked.tone, Hlg):
        _check_hlg(asked.tone)
    elif isinstance(asked.tone, Curve):
        _check_curve(asked.tone)


def check_logprobs(asked: int | None) -> None:
    """Raises `Refused` (invalid_request)."""
    if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
        problem = f"top_logprobs is {asked}; it has to be from 0 to {MAX_LOGPROBS}"
        raise _refused(problem, "top_logprobs")


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises `Refused` (invalid_request) for the first id outside the vocabulary."""
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise _refused(f"token id {bad} is outside the vocabulary of {vocab_size}", param)


def resolve_sampling(
    asked: Sampling, defaults: Sampling, *, xtc_keep: tuple[int, ...] = (), logprobs: int | None = None
) -> SamplingPlan:
    """Field by field: the request (a profile's fields are in it already), else the model's `generation_config.json`,
    else temperature 0.7 and no cuts.
    """

    def pick(name: str, built_in: float) -> float:
        for source in (asked, defaults):
            value = getattr(source, name)
            if value is not None:
                return float(value)
        return built_in

    temperature = pick("temperature", DEFAULT_TEMPERATURE)
    return SamplingPlan(
        # Below this a draw is the most likely token anyway, and 1 / temperature leaves float32.
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(pick("top_p", 1.0), MIN_TOP_P),
        top_k=int(pick("top_k", 0)),
        min_p=pick("min_p", 0.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=pick("presence_penalty", 0.0),
        frequency_penalty=pick("frequency_penalty", 0.0),
        repetition_window=int(pick("repetition_window", PENALTY_WINDOW)),
        presence_window=int(pick("presence_window", PENALTY_WINDOW)),
        frequency_window=int(pick("frequency_window", PENALTY_WINDOW)),
        xtc_probability=pick("xtc_probability", 0.0),
        xtc_threshold=pick("xtc_threshold", 0.1),
        xtc_keep=xtc_keep,
        logit_bias=tuple((asked.logit_bias or {}).items()),
        tone=asked.tone or defaults.tone,
        logprobs=logprobs,
    )


def _check_bias(biases: dict[int, float], vocab_size: int) -> None:
    if len(biases) > MAX_BIASES:
        raise _refused(f"logit_bias has {len(biases)} entries; {MAX_BIASES} are allowed", "logit_bias")
    check_ids(biases, vocab_size, "logit_bias")
    bad = next(((i, value) for i, value in biases.items() if not -100 <= value <= 100), None)
    if bad is not None:
        raise _refused(
            f"logit_bias of token {bad[0]} is {bad[1]}; it has to be from -100 to 100", "logit_bias"
        )


def _check_hlg(tone: Hlg) -> None:
    sizes = {"width": tone.width, "shoulder": tone.shoulder, "toe": tone.toe, "offset": tone.offset}
    for name, value in sizes.items():
        if value is None:
            continue
        least = 1e-3 if name in ("shoulder", "toe") else 0 if name == "width" else -1e3
        if not least <= value <= 1e3:
            raise _refused(f"{name} of tone is {value}; it has to be from {least:g} to 1000", "tone")


def _check_curve(tone: Curve) -> None:
    if not -1e3 <= tone.floor <= -1e-3:
        raise _refused(f"floor of tone is {tone.floor}; it has to be from -1000 to -0.001", "tone")
    if not 2 <= len(tone.points) <= 64:
        raise _refused(f"tone has {len(tone.points)} points; it needs from 2 to 64", "tone")
    if not all(-1e3 <= number <= 1e3 for point in tone.points for number in point):
        raise _refused("a point of tone is not from -1000 to 1000 %", "tone")
    for (x, y), (next_x, next_y) in zip(tone.points, tone.points[1:], strict=False):
        if next_x - x < 1e-3 or next_y < y:
            problem = (
                f"tone goes from ({x:g}, {y:g}) to ({next_x:g}, {next_y:g}); x has to rise, y must not fall"
            )
            raise _refused(problem, "tone")


def _refused(problem: str, param: str) -> Refused:
    return refuse(ErrorCode.INVALID_REQUEST, problem, param=param)
