"""Gated delta net: linear attention whose memory is one matrix per head, whatever the length.

Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"; as in transformers 5.24 `modeling_qwen3_5.py`. Per token, with
S `[Dv, Dk]`: S decays, forgets what it held under the key and holds the value there instead, by `beta`; the answer is
what the query finds. Tokens that come alone take that step, several at once the chunked form: inside a chunk all
corrections together solve a triangular system (WY form), and only chunks follow one another.
"""

from dataclasses import dataclass

import mlx.core as mx

from worker.layers.activations import silu
from worker.layers.batch import Batch, Row
from worker.layers.linear import Linear

CHUNK = 64
"""Tokens whose corrections are solved together."""

SMALL = 16
"""Triangular systems up to this size are inverted as whole matrices, greater ones by halves."""


@dataclass(frozen=True, slots=True)
class Heads:
    """`keys` heads of queries and keys of `key_dim`, `values` heads of values of `value_dim`, some per key head."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def shared(self) -> int:
        """Value heads that one key head serves."""
        return self.values // self.keys


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the recurrence takes of T tokens, float32: `q`, `k` `[T, Hk, Dk]`, `v` `[T, Hv, Dv]`, the logarithm of the
    decay and `beta` `[T, Hv]`."""

    q: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array


class GatedDeltaNet:
    """One layer. `place`: of its cache, which keeps the last inputs of the convolution `[1, K - 1, C]` and S
    `[1, Hv, Dv, Dk]` float32.

    `conv` `[C, K]` over queries, keys and values side by side; `rate` and `dt_bias` `[Hv]`, `rate` below 0, and
    `norm` `[Dv]`, all float32.
    """

    def __init__(
        self,
        *,
        place: int,
        heads: Heads,
        qkv: Linear,
        z: Linear,
        a: Linear,
        b: Linear,
        out: Linear,
        conv: mx.array,
        rate: mx.array,
        dt_bias: mx.array,
        norm: mx.array,
        eps: float,
    ) -> None:
        self.place, self.heads = place, heads
        self.qkv, self.z, self.a, self.b, self.out = qkv, z, a, b, out
        self.conv, self.rate, self.dt_bias, self.norm, self.eps = conv, rate, dt_bias, norm, eps

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """`x` [T, D] to the same shape."""
        count, heads = x.shape[0], self.heads
        mixed = self.qkv(x)
        groups = _groups(batch)
        tails = [self._tails(rows, x.dtype) for rows in groups]
        spans = [(rows[0].begin, rows[-1].end) for rows in groups]
        parts = [
            convolved(tail, _of(mixed, span, len(rows)), self.conv)
            for tail, span, rows in zip(tails, spans, groups, strict=True)
        ]
        flat = [silu(out).reshape(-1, out.shape[-1]) for out, _ in parts]
        inputs = self._inputs(flat[0] if len(flat) == 1 else mx.concatenate(flat), x)
        answers = []
        for rows, span, (_, tail) in zip(groups, spans, parts, strict=True):
            states = self._states(rows)
            answer, states = delta_rule(inputs, span, states, heads)
            answers.append(answer)
            for number, row in enumerate(rows):
                one = slice(number, number + 1)
                kept = [tail, states] if len(rows) == 1 else [tail[one], states[one]]
                row.caches[self.place].advance(row.length, kept)
        answer = answers[0] if len(answers) == 1 else mx.concatenate(answers)
        gate = self.z(x).reshape(count, heads.values, heads.value_dim).astype(mx.float32)
        normed = mx.fast.rms_norm(answer, self.norm, self.eps)
        return self.out((normed * silu(gate)).astype(x.dtype).reshape(count, -1))

    def _inputs(self, mixed: mx.array, x: mx.array) -> Inputs:
        heads = self.heads
        wide = heads.keys * heads.key_dim
        q, k, v = mx.split(mixed, [wide, 2 * wide], axis=-1)
        q = q.reshape(-1, heads.keys, heads.key_dim)
        k = k.reshape(-1, heads.keys, heads.key_dim)
        # x / |x| is the RMS norm without weights over sqrt(dim); queries are divided by sqrt(dim) once more.
        eps = 1e-6 / heads.key_dim
        steps = mx.logaddexp(self.a(x).astype(mx.float32) + self.dt_bias, mx.array(0.0))
        return Inputs(
            mx.fast.rms_norm(q, None, eps) / heads.key_dim,
            mx.fast.rms_norm(k, None, eps) * heads.key_dim**-0.5,
            v.reshape(-1, heads.values, heads.value_dim),
            self.rate * steps,
            mx.sigmoid(self.b(x).astype(mx.float32)),
        )

    def _tails(self, rows: list[Row], dtype: mx.Dtype) -> mx.array:
        """The last inputs of the convolution of some rows, `[R, K - 1, C]`."""
        channels, taps = self.conv.shape
        blank = mx.zeros((1, taps - 1, channels), dtype)
        return _stacked([row.caches[self.place].states[:1] or [blank] for row in rows])

    def _states(self, rows: list[Row]) -> mx.array:
        """S of some rows, `[R, Hv, Dv, Dk]`."""
        heads = self.heads
        blank = mx.zeros((1, heads.values, heads.value_dim, heads.key_dim), mx.float32)
        return _stacked([row.caches[self.place].states[1:] or [blank] for row in rows])


def convolved(tail: mx.array, mixed: mx.array, conv: mx.array) -> tuple[mx.array, mx.array]:
    """The causal convolution of each channel of `mixed` `[R, L, C]` behind `tail` `[R, K - 1, C]`.

    -> (`[R, L, C]` float32, the tail for what comes next).
    """
    whole = mx.concatenate([tail, mixed], axis=1)
    length, taps = mixed.shape[1], conv.shape[1]
    wide, weights = whole.astype(mx.float32), conv.astype(mx.float32).T
    out = wide[:, :length] * weights[0]
    for tap in range(1, taps):
        out = out + wide[:, tap : tap + length] * weights[tap]
    return out, whole[:, length:]


def delta_rule(
    inputs: Inputs, span: tuple[int, int], states: mx.array, heads: Heads
) -> tuple[mx.array, mx.array]:
    """The recurrence over the tokens `span` from `states` `[R, Hv, Dv, Dk]` on: one token each of R rows, or all of
    one row. -> (answers `[tokens, Hv, Dv]`, states after them)."""
    if span[1] - span[0] == states.shape[0]:
        return _step(inputs, span, states, heads)
    return _chunks(inputs, span, states, heads)


def _step(inputs: Inputs, span: tuple[int, int], states: mx.array, heads: Heads) -> tuple[mx.array, mx.array]:
    q, k, v, decay, beta = (_cut(one, span) for one in _all(inputs))
    rows, groups = q.shape[0], (heads.keys, heads.shared)
    state = states.reshape(rows, *groups, heads.value_dim, heads.key_dim)
    kept = mx.exp(decay).reshape(rows, *groups, 1)
    both = mx.stack([k, q], axis=-1)[:, :, None]  # [R, Hk, 1, Dk, 2]
    found = (state @ both) * kept[..., None]  # under the key, under the query, before the correction
    delta = (v.reshape(rows, *groups, -1) - found[..., 0]) * beta.reshape(rows, *groups, 1)
    overlap = (q * k).sum(axis=-1)[:, :, None, None]
    answer = found[..., 1] + delta * overlap
    state = state * kept[..., None] + delta[..., None] * k[:, :, None, None]
    return answer.reshape(rows, heads.values, heads.value_dim), state.reshape(states.shape)


def _chunks(
    inputs: Inputs, span: tuple[int, int], states: mx.array, heads: Heads
) -> tuple[mx.array, mx.array]:
    """In chunks of `CHUNK` tokens; the last is filled up with tokens that change nothing."""
    length = span[1] - span[0]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // size)

    def chunked(x: mx.array) -> mx.array:
        """`[T, H, ...]` to `[chunks, Hk, H / Hk, size, ...]`."""
        x = _cut(x, span)
        if count * size > length:
            x = mx.concatenate([x, mx.zeros((count * size - length, *x.shape[1:]), x.dtype)])
        x = x.reshape(count, size, heads.keys, x.shape[1] // heads.keys, *x.shape[2:])
        return x.transpose(0, 2, 3, 1, *range(4, x.ndim))

    q, k, v, decay, beta = (chunked(one) for one in _all(inputs))
    beta = beta[..., None]
    total = mx.cumsum(decay, axis=-1)  # logarithm of the decay since the chunk began
    before = mx.tril(mx.ones((size, size), mx.bool_))
    between = mx.exp(mx.where(before, total[..., :, None] - total[..., None, :], -mx.inf))
    since = mx.exp(total)[..., None]
    turned = k.swapaxes(-1, -2)
    # Token i corrects by what the state holds under its key, the corrections j < i of its chunk included.
    inverse = unit_inverse((k @ turned) * between * beta)
    values, reads = inverse @ (v * beta), inverse @ (k * beta * since)
    within = (q @ turned) * between
    queries, keys = q * since, k * mx.exp(total[..., -1:] - total)[..., None]
    decayed = mx.exp(total[..., -1])[..., None, None]
    state = states.reshape(heads.keys, heads.shared, heads.value_dim, heads.key_dim)
    answers = []
    for n in range(count):
        seen = state.swapaxes(-1, -2)
        new = values[n] - reads[n] @ seen
        answers.append(queries[n] @ seen + within[n] @ new)
        state = state * decayed[n] + new.swapaxes(-1, -2) @ keys[n]
    answer = mx.concatenate(answers, axis=-2).transpose(2, 0, 1, 3)[:length]
    return answer.reshape(length, heads.values, heads.value_dim), state.reshape(states.shape)


def unit_inverse(lower: mx.array) -> mx.array:
    """The inverse of I + A, where A is what `lower` `[..., n, n]` has below its diagonal; n a power of two.

    Blocks on the diagonal are inverted, two of them and what is between them make the next block. As exact as solving
    row by row, in log2(n) products; a power series of A would lose everything where keys repeat.
    """
    size = lower.shape[-1]
    half = size // 2
    if size > SMALL:
        first, last = unit_inverse(mx.stack([lower[..., :half, :half], lower[..., half:, half:]]))
        corner = -(last @ lower[..., half:, :half] @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        return mx.concatenate([top, mx.concatenate([corner, last], axis=-1)], axis=-2)
    found = mx.eye(size)
    places = mx.arange(size)
    width = 1
    while width < size:
        block = places // width
        pairs = (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)
        found = found - found @ mx.where(pairs, lower, 0.0) @ found
        width *= 2
    return found


def _groups(batch: Batch) -> list[list[Row]]:
    """Rows side by side that have one token each are stepped together, any other by itself."""
    groups: list[list[Row]] = []
    for row in batch.rows:
        if row.length == 1 and groups and groups[-1][-1].length == 1:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _all(inputs: Inputs) -> tuple[mx.array, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta


def _cut(x: mx.array, span: tuple[int, int]) -> mx.array:
    return x if span == (0, x.shape[0]) else x[span[0] : span[1]]


def _of(mixed: mx.array, span: tuple[int, int], rows: int) -> mx.array:
    """The tokens of some rows, `[R, L, C]`."""
    part = _cut(mixed, span)
    return part.reshape(rows, -1, part.shape[-1])


def _stacked(parts: list[list[mx.array]]) -> mx.array:
    return parts[0][0] if len(parts) == 1 else mx.concatenate([part[0] for part in parts])
