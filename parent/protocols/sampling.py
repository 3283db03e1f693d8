"""The fields of a body that say how tokens are drawn: read, checked, and put into our words. Pure.

OpenAI's names, with those of vLLM, llama.cpp and mlx-lm for what OpenAI does not have.
"""

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from parent.protocols.limits import shown
from parent.protocols.refusing import invalid
from shared import wire

MAX_INT = (1 << 63) - 1


class HlgFields(msgspec.Struct, frozen=True, kw_only=True):
    """`hlg`: the tone curve after hybrid log-gamma; see `wire.Hlg`."""

    enabled: bool | None = None
    width: float | None = None
    shoulder: float | None = None
    toe: float | None = None
    pivot_offset: float | None = None
    pivot: str | None = None


class CurveFields(msgspec.Struct, frozen=True, kw_only=True):
    """`curve`: a tone curve through points; see `wire.Curve`."""

    points: list[tuple[float, float]]
    floor: float | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """`null` is the same as leaving a field out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_context_size: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: dict[str, float] | None = None
    hlg: HlgFields | None = None
    curve: CurveFields | None = None


class Range(NamedTuple):
    """`low` is itself fine only where `is_closed`."""

    low: float
    high: float | None
    words: str
    is_closed: bool = True

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.is_closed else value > self.low
        return above and (self.high is None or value <= self.high)


RANGES = {
    "temperature": Range(0, 5, "from 0 to 5"),
    "top_p": Range(0, 1, "above 0 and at most 1", is_closed=False),
    "top_k": Range(0, None, "0 (off) or more"),
    "min_p": Range(0, 1, "from 0 to 1"),
    "presence_penalty": Range(-2, 2, "from -2 to 2"),
    "presence_context_size": Range(0, None, "0 (all tokens) or more"),
    "frequency_penalty": Range(-2, 2, "from -2 to 2"),
    "frequency_context_size": Range(0, None, "0 (all tokens) or more"),
    "repetition_penalty": Range(0.001, 1000, "from 0.001 to 1000"),
    "repeat_penalty": Range(0.001, 1000, "from 0.001 to 1000"),
    "repetition_context_size": Range(0, None, "0 (all tokens) or more"),
    "xtc_probability": Range(0, 1, "from 0 to 1"),
    "xtc_threshold": Range(0, 0.5, "from 0 to 0.5"),
}
_HLG = {
    "width": Range(0, 1000, "from 0 to 1000"),
    "shoulder": Range(0.001, 1000, "from 0.001 to 1000"),
    "toe": Range(0.001, 1000, "from 0.001 to 1000"),
    "pivot_offset": Range(-1000, 1000, "from -1000 to 1000"),
}
_PIVOTS = ("top", "entropy", "median")
_BIAS = Range(-100, 100, "from -100 to 100")
_POINT = Range(-1000, 1000, "from -1000 to 1000 (percent)")
_FLOOR = Range(-1000, -0.001, "from -1000 to -0.001")
MAX_POINTS = 64


def sampling(body: SamplingFields) -> wire.Sampling:
    """`None` leaves a choice to the model's defaults. Raises `Refused` naming the field."""
    for name, allowed in RANGES.items():
        _check(name, getattr(body, name), allowed)
    repetition = body.repetition_penalty
    if repetition is None:
        repetition = body.repeat_penalty
    elif body.repeat_penalty not in (None, repetition):
        raise invalid(
            "repeat_penalty", "is another name of repetition_penalty and must not say another value"
        )
    return wire.Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=clamped(body.top_k),
        min_p=body.min_p,
        repetition_penalty=repetition,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_window=clamped(body.repetition_context_size),
        presence_window=clamped(body.presence_context_size),
        frequency_window=clamped(body.frequency_context_size),
        xtc_probability=body.xtc_probability,
        xtc_threshold=body.xtc_threshold,
        logit_bias=_bias(body.logit_bias),
        tone=_tone(body),
    )


def clamped(count: int | None) -> int | None:
    """A count as the wire can carry it; what is beyond means no limit anyway."""
    return None if count is None else min(count, MAX_INT)


def _check(name: str, value: float | None, allowed: Range) -> None:
    if value is not None and not allowed.holds(value):
        raise invalid(name, f"must be {allowed.words}, not {shown(value)}")


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    biases = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise invalid("logit_bias", f"a key must be the number of a token, not {shown(key)}")
        _check("logit_bias", value, _BIAS)
        if value:
            biases[int(key)] = value
    return biases or None


def _tone(body: SamplingFields) -> wire.Hlg | wire.Curve | None:
    hlg = body.hlg if body.hlg is not None and body.hlg.enabled is not False else None
    if body.curve is not None:
        if hlg is not None:
            raise invalid("curve", "there is one tone curve; give hlg or curve, not both")
        return _curve(body.curve)
    if hlg is None:
        return None
    for name, allowed in _HLG.items():
        _check(f"hlg.{name}", getattr(hlg, name), allowed)
    if hlg.pivot not in (None, *_PIVOTS):
        raise invalid("hlg.pivot", f"must be one of {', '.join(_PIVOTS)}, not {shown(hlg.pivot)}")
    given = {"width": hlg.width, "shoulder": hlg.shoulder, "toe": hlg.toe, "offset": hlg.pivot_offset}
    given_pivot = {} if hlg.pivot is None else {"pivot": hlg.pivot}
    sizes = {name: each for name, each in given.items() if each is not None}
    return replace(wire.Hlg(), **sizes, **given_pivot)


def _curve(given: CurveFields) -> wire.Curve:
    where = "curve.points"
    if not 2 <= len(given.points) <= MAX_POINTS:
        raise invalid(where, f"from 2 to {MAX_POINTS} points are possible, not {len(given.points)}")
    for point in given.points:
        for number in point:
            _check(where, number, _POINT)
    for (x, y), (next_x, next_y) in zip(given.points, given.points[1:], strict=False):
        if next_x - x < 0.001 or next_y < y:
            raise invalid(
                where, f"x must rise and y must not fall from ({x:g}, {y:g}) to ({next_x:g}, {next_y:g})"
            )
    _check("curve.floor", given.floor, _FLOOR)
    points = tuple(given.points)
    return wire.Curve(points) if given.floor is None else wire.Curve(points, given.floor)
