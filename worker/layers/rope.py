"""Rotary position embeddings: every published `rope_type` of llama-like models.

Formulas: transformers 5.24, `modeling_rope_utils.py`. There a rotation is given as `inv_freq` and a factor on
cos and sin; here as the reciprocal, which `mx.fast.rope` takes, and the factor goes into the softmax scale.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from worker.layers.batch import Batch, Rotate, Row

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates the first `dims` values of each head. Halves are paired, or neighbours (`interleaved`)."""

    dims: int
    base: float | None
    scale: float
    freqs: mx.array | None
    factor: float  # on the rotated values; 1.0 where the softmax scale carries it
    interleaved: bool = False

    def kernel(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate `x` [B, H, L, D] of positions from `offset` on; an int32 array [B] gives one a row."""
        dims = self.dims
        x = mx.fast.rope(
            x,
            dims,
            traditional=self.interleaved,
            base=self.base,
            scale=self.scale,
            offset=offset,
            freqs=self.freqs,
        )
        return (
            x if self.factor == 1.0 else mx.concatenate([x[..., :dims] * self.factor, x[..., dims:]], axis=-1)
        )

    def angles(self, positions: mx.array) -> mx.array:
        """Radians [T, 1, dims / 2] of float32 `positions` [T]."""
        freqs = self.freqs
        if freqs is None:
            assert self.base is not None
            freqs = mx.array(_freqs(self.base, self.dims), mx.float32)
        return (positions * self.scale)[:, None, None] / freqs

    def by_table(self, angles: mx.array, dtype: mx.Dtype) -> Rotate:
        """The rotation by `angles`. Interleaved heads come out with their halves paired, queries and keys alike."""
        dims, half = self.dims, self.dims // 2
        cos, sin = mx.cos(angles) * self.factor, mx.sin(angles) * self.factor
        cosines = mx.concatenate([cos, cos], axis=-1).astype(dtype)
        sines = mx.concatenate([-sin, sin], axis=-1).astype(dtype)
        interleaved = self.interleaved
        pair = (*cosines.shape[:-1], 2, half)
        cosine_pairs, sine_pairs = cosines.reshape(pair), sines.reshape(pair)

        def rotate(x: mx.array) -> mx.array:
            if dims == x.shape[-1] and not interleaved:  # the halves swap in place, without a copy
                pairs = x.reshape(*x.shape[:-1], 2, half)
                return (pairs * cosine_pairs + pairs[..., ::-1, :] * sine_pairs).reshape(x.shape)
            rest = x[..., dims:] if dims < x.shape[-1] else None
            if interleaved:
                low, high = x[..., 0:dims:2], x[..., 1:dims:2]
            else:
                low, high = x[..., :half], x[..., half:dims]
            turned = (
                mx.concatenate([low, high], axis=-1) * cosines + mx.concatenate([high, low], axis=-1) * sines
            )
            return turned if rest is None else mx.concatenate([turned, rest], axis=-1)

        return rotate


class Rope:
    """The rotation of a model. Some kinds depend on how long the sequence is: `at(length)`.

    `softmax_factor`: multiply the attention scale with it. `regime` gives the same number for lengths that are
    rotated alike; None: all are.
    """

    def __init__(
        self,
        at: Callable[[int], Rotation],
        softmax_factor: float,
        regime: Callable[[int], int] | None = None,
    ) -> None:
        self.at = at
        self.softmax_factor = softmax_factor
        self._regime = regime

    def regime(self, length: int) -> int:
        """Keys rotated for sequences of two lengths serve each other where this is the same for both."""
        return 0 if self._regime is None else self._regime(length)

    def interleaved(self) -> "Rope":
        """The same with neighbours paired."""
        if self._regime is None:
            rotation = replace(self.at(1), interleaved=True)
            return _fixed(rotation, self.softmax_factor)
        at = self.at
        return Rope(lambda length: replace(at(length), interleaved=True), self.softmax_factor, self._regime)

    def over(self, batch: Batch, dtype: mx.Dtype) -> Rotate:
        """The rotation of all tokens of a step, made once and used by every layer.

        On CPU by a table, because `mx.fast.rope` would work out sines in every layer.
        """
        rows = batch.rows
        first = self.at(rows[0].total)
        if mx.default_device().type != mx.DeviceType.cpu:
            if batch.decodes and self._regime is None:
                offsets = mx.array([row.offset for row in rows], dtype=mx.int32)
                return lambda x: first.kernel(x[:, :, None], offsets)[:, :, 0]
            return self._row_by_row(rows)
        if self._regime is None:
            return first.by_table(first.angles(_positions(rows)), dtype)
        angles = [self.at(row.total).angles(_positions([row])) for row in rows]
        return first.by_table(mx.concatenate(angles) if len(angles) > 1 else angles[0], dtype)

    def _row_by_row(self, rows: Sequence[Row]) -> Rotate:
        rotations = [self.at(row.total) for row in rows]

        def rotate(x: mx.array) -> mx.array:
            parts = []
            for rotation, row in zip(rotations, rows, strict=True):
                heads = x[row.begin : row.end].transpose(1, 0, 2)[None]
                parts.append(rotation.kernel(heads, row.offset)[0].transpose(1, 0, 2))
            return parts[0] if len(parts) == 1 else mx.concatenate(parts)

        return rotate


def _positions(rows: Sequence[Row]) -> mx.array:
    """Of all tokens of some rows, float32 [T]."""
    parts = [mx.arange(row.offset, row.offset + row.length, dtype=mx.float32) for row in rows]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def make_rope(params: Params, head_dim: int, max_positions: int, *, interleaved: bool = False) -> Rope:
    """The rope of normalised `rope_parameters`. Raises `Refused` (unsupported) for a kind not known."""
    rope = _make(params, head_dim, max_positions)
    return rope.interleaved() if interleaved else rope


def _make(params: Params, head_dim: int, max_positions: int) -> Rope:
    kind = params["rope_type"]
    if kind == "su":  # the first Phi-3 checkpoints' word for it
        kind = "longrope"
    make = _KINDS.get(kind)
    if make is None:
        known = ", ".join(_KINDS)
        raise refuse(
            ErrorCode.UNSUPPORTED, f"config.json: rope_type {kind!r} is not supported; known are {known}"
        )
    try:
        return make(params, head_dim, max_positions)
    except KeyError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"config.json: rope_type {kind!r} needs {error}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise refuse(
            ErrorCode.BAD_CHECKPOINT, f"config.json: the parameters of rope_type {kind!r} are wrong ({error})"
        ) from None


# ---------------------------------------------------------------- the kinds


def _default(params: Params, head_dim: int, max_positions: int) -> Rope:
    rotation = Rotation(_dims(params, head_dim), _theta(params), 1.0, None, 1.0)
    return _fixed(rotation, 1.0)


def _linear(params: Params, head_dim: int, max_positions: int) -> Rope:
    rotation = Rotation(_dims(params, head_dim), _theta(params), 1.0 / params["factor"], None, 1.0)
    return _fixed(rotation, 1.0)


def _dynamic(params: Params, head_dim: int, max_positions: int) -> Rope:
    """NTK: the base grows with the length once it is past what the model was trained for."""
    dims, theta, factor = _dims(params, head_dim), _theta(params), float(params["factor"])
    short = Rotation(dims, theta, 1.0, None, 1.0)

    def at(length: int) -> Rotation:
        if length <= max_positions:
            return short
        stretch = factor * length / max_positions - (factor - 1)
        return Rotation(dims, theta * stretch ** (dims / (dims - 2)), 1.0, None, 1.0)

    return Rope(at, 1.0, lambda length: max(length, max_positions))


def _yarn(params: Params, head_dim: int, max_positions: int) -> Rope:
    dims, theta = _dims(params, head_dim), _theta(params)
    original = params["original_max_position_embeddings"]
    factor = params.get("factor") or max_positions / original
    attention = params.get("attention_factor")
    if attention is None:
        mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        if mscale and all_dim:
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        else:
            attention = yarn_mscale(factor, 1.0)

    def correction(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(params.get("beta_fast") or 32), correction(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = (high - low) or 0.001
    freqs = []
    for i, freq in enumerate(_freqs(theta, dims)):
        interpolated = min(max((i - low) / span, 0.0), 1.0)
        freqs.append(1.0 / (interpolated / (factor * freq) + (1.0 - interpolated) / freq))
    return _scaled(freqs, head_dim, float(attention))


def _longrope(params: Params, head_dim: int, max_positions: int) -> Rope:
    """One set of factors up to the original length, another once the sequence is longer."""
    dims, theta = _dims(params, head_dim), _theta(params)
    original = params["original_max_position_embeddings"]
    factor = params.get("factor") or max_positions / original
    attention = params.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    sides = []
    for key in ("short_factor", "long_factor"):
        if len(params[key]) != dims // 2:
            raise ValueError(f"{key} has {len(params[key])} entries, wanted {dims // 2}")
        freqs = [each * freq for each, freq in zip(params[key], _freqs(theta, dims), strict=True)]
        sides.append(_scaled(freqs, head_dim, float(attention)))
    short, long = sides
    return Rope(
        lambda length: (long if length > original else short).at(length),
        short.softmax_factor,
        lambda length: int(length > original),
    )


def _proportional(params: Params, head_dim: int, max_positions: int) -> Rope:
    """Gemma 4: whole heads are paired, and of the pairs the first part turns."""
    turning = _dims(params, head_dim) // 2
    theta, factor = _theta(params), float(params.get("factor") or 1.0)
    freqs = [factor * theta ** (2 * i / head_dim) for i in range(turning)]
    freqs += [math.inf] * (head_dim // 2 - turning)
    return _fixed(Rotation(head_dim, None, 1.0, mx.array(freqs, mx.float32), 1.0), 1.0)


def _llama3(params: Params, head_dim: int, max_positions: int) -> Rope:
    dims, factor = _dims(params, head_dim), params["factor"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    original = params["original_max_position_embeddings"]
    freqs = []
    for freq in _freqs(_theta(params), dims):
        wavelength = 2 * math.pi * freq
        if wavelength < original / high:
            freqs.append(freq)
        elif wavelength > original / low:
            freqs.append(freq * factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            freqs.append(freq / ((1 - smooth) / factor + smooth))
    return _scaled(freqs, head_dim, 1.0)


_KINDS: Mapping[str, Callable[[Params, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


# ---------------------------------------------------------------- parts


def _theta(params: Params) -> float:
    return float(params.get("rope_theta", 10000.0))


def _dims(params: Params, head_dim: int) -> int:
    dims = int(head_dim * params.get("partial_rotary_factor", 1.0))
    if dims < 2 or dims % 2 or dims > head_dim:
        raise ValueError(f"{dims} of {head_dim} values of a head would be rotated")
    return dims


def _freqs(theta: float, dims: int) -> list[float]:
    """Radians to a position, reciprocal: theta^(2i/dims), double precision."""
    return [float(theta ** (i / dims)) for i in range(0, dims, 2)]


def yarn_mscale(scale: float, mscale: float) -> float:
    """How much longer vectors are made for a context `scale` times longer; YaRN (2023), 3.4."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _fixed(rotation: Rotation, softmax_factor: float) -> Rope:
    return Rope(lambda length: rotation, softmax_factor)


def _scaled(freqs: list[float], head_dim: int, attention: float) -> Rope:
    """A fixed rotation. The factor on q and k goes into the softmax where it holds for whole heads."""
    dims = 2 * len(freqs)
    whole = dims == head_dim
    rotation = Rotation(dims, None, 1.0, mx.array(freqs, mx.float32), 1.0 if whole else attention)
    return _fixed(rotation, attention * attention if whole else 1.0)
