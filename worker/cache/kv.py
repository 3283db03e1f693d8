"""The KV cache of one layer: keys and values of the tokens seen so far, growing in place.

Both kinds hold their tokens in order in one buffer `[B, H, capacity, D]` that grows in steps, so that a
decode step writes one slice instead of copying everything. `RotatingKV` additionally forgets tokens that no
later query of a sliding-window layer can see. While a clone shares a buffer, a write copies it first (mlx's
own rule for memory in use elsewhere), so clones are cheap and independent.
"""

from typing import Any, Literal, Protocol

import mlx.core as mx
import msgspec

from shared.kv_layout import KV_STEP as STEP
from shared.kv_layout import LayerKv

_async_eval: Any = mx.async_eval  # mlx leaves it untyped

Mask = mx.array | str | None


class LayerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a layer's cache is besides its arrays: enough to make it again around them.

    `offset`: tokens seen; the arrays hold those from `start` on.
    """

    kind: Literal["full", "rotating", "recurrent"]
    offset: int
    start: int = 0
    window: int = 0


class LayerCache(Protocol):
    """What attention and the engine need of a layer's cache. `planned`: see `DecoderModel.make_caches`."""

    offset: int
    planned: int

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...
    def mask(self, length: int) -> Mask: ...
    def can_trim(self, count: int) -> bool: ...
    def trim(self, count: int) -> None: ...
    def cut(self) -> None: ...
    def clone(self) -> "LayerCache": ...
    def compact(self) -> None: ...
    def arrays(self) -> list[mx.array]: ...
    def state(self) -> LayerState: ...
    def fill(self, arrays: list[mx.array]) -> None: ...
    def holds(self, shapes: list[list[int]]) -> bool: ...
    @property
    def nbytes(self) -> int: ...


class FullKV:
    """Keys and values of every token. `offset`: tokens seen."""

    __slots__ = ("keys", "offset", "planned", "values")

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self.planned = 0

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `[B, H, L, D]`; gives those of all tokens `[B, H, offset, D]`."""
        begin, end = self.offset, self.offset + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            self.keys = _grown(self.keys, begin, end, keys)
            self.values = _grown(self.values, begin, end, values)
        assert self.values is not None
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def mask(self, length: int) -> Mask:
        """The attention mask for the next `length` tokens; ask before `update`."""
        return None if length == 1 else "causal"

    def can_trim(self, count: int) -> bool:
        """Whether the last `count` tokens can be forgotten."""
        return 0 <= count <= self.offset

    def trim(self, count: int) -> None:
        """Forget the last `count` tokens. Raises ValueError where `can_trim` says no."""
        if not self.can_trim(count):
            raise ValueError(f"cannot trim {count} of {self.offset} tokens")
        self.offset -= count

    def cut(self) -> None:
        """Have no room for tokens to come: the next update makes some, and copies only what is used."""
        self.keys, self.values = _cut(self.keys, self.offset), _cut(self.values, self.offset)

    def state(self) -> LayerState:
        """For `empty_like`."""
        return LayerState("full", self.offset)

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the arrays of a cache of the same state, cut."""
        self.keys, self.values = arrays

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be those of a cache of this state, cut."""
        return _are_of(shapes, self.offset)

    def compact(self) -> None:
        """Give back the room for tokens to come, where it is worth a copy."""
        self.keys, self.values = _compacted(self.keys, self.offset), _compacted(self.values, self.offset)

    def clone(self) -> "FullKV":
        """A copy that shares memory until either side writes."""
        other = FullKV()
        other.keys, other.values = _share(self.keys), _share(self.values)
        other.offset, other.planned = self.offset, self.planned
        return other

    def arrays(self) -> list[mx.array]:
        """The buffers, for `mx.eval`."""
        return [one for one in (self.keys, self.values) if one is not None]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.arrays())


class RotatingKV:
    """Keys and values of a sliding-window layer: a query sees itself and `window - 1` tokens before it.

    `start` is the position of the buffer's first token. While a chunk of L tokens is attended the cache holds
    `window - 1 + L` tokens; what is out of every later window is dropped when the buffer would have to grow.
    """

    __slots__ = ("keys", "offset", "planned", "start", "values", "window")

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a sliding window of {window} tokens")
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self.start = 0
        self.planned = 0

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[B, H, L, D]`; gives the last `min(offset, window - 1 + L)` tokens, in order."""
        length = keys.shape[2]
        first = self._first_visible()
        begin, end = self.offset - self.start, self.offset - self.start + length
        if self.keys is None or end > self.keys.shape[2]:
            self.keys = _moved(self.keys, first - self.start, begin, length, keys)
            self.values = _moved(self.values, first - self.start, begin, length, values)
            self.start = first
            begin, end = self.offset - first, self.offset - first + length
        assert self.values is not None
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self.offset += length
        low = first - self.start
        return self.keys[..., low:end, :], self.values[..., low:end, :]

    def mask(self, length: int) -> Mask:
        """The attention mask for the next `length` tokens, boolean `[L, tokens of update]`; ask before it."""
        if length == 1:
            return None
        if self.offset + length <= self.window:
            return "causal"
        queries = mx.arange(self.offset, self.offset + length)[:, None]
        keys = mx.arange(self._first_visible(), self.offset + length)[None]
        return (keys <= queries) & (keys > queries - self.window)

    def can_trim(self, count: int) -> bool:
        """Whether the last `count` tokens can be forgotten and everything a next query sees is still held."""
        left = self.offset - count
        return 0 <= count <= self.offset and self.start <= max(0, left - (self.window - 1))

    def trim(self, count: int) -> None:
        """Forget the last `count` tokens. Raises ValueError where `can_trim` says no."""
        if not self.can_trim(count):
            raise ValueError(f"cannot trim {count} of {self.offset} tokens of a window of {self.window}")
        self.offset -= count

    def cut(self) -> None:
        """Have no room for tokens to come: the next update makes some, and copies only what is used."""
        used = self.offset - self.start
        self.keys, self.values = _cut(self.keys, used), _cut(self.values, used)

    def state(self) -> LayerState:
        """For `empty_like`."""
        return LayerState("rotating", self.offset, self.start, self.window)

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the arrays of a cache of the same state, cut."""
        self.keys, self.values = arrays

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be those of a cache of this state, cut."""
        return _are_of(shapes, self.offset - self.start)

    def compact(self) -> None:
        """Give back the room for tokens to come, where it is worth a copy."""
        used = self.offset - self.start
        self.keys, self.values = _compacted(self.keys, used), _compacted(self.values, used)

    def clone(self) -> "RotatingKV":
        """A copy that shares memory until either side writes."""
        other = RotatingKV(self.window)
        other.keys, other.values = _share(self.keys), _share(self.values)
        other.offset, other.start, other.planned = self.offset, self.start, self.planned
        return other

    def arrays(self) -> list[mx.array]:
        """The buffers, for `mx.eval`."""
        return [one for one in (self.keys, self.values) if one is not None]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.arrays())

    def _first_visible(self) -> int:
        """Position of the oldest token that the next query sees."""
        return max(0, self.offset - (self.window - 1))


class RecurrentState:
    """What a recurrent layer knows of all tokens before: arrays of a fixed size, the same for every length.

    The layer reads `states` and puts others in their place with `advance`; it never writes into one, so that clones
    share them. There is no way back to an earlier token.
    """

    __slots__ = ("offset", "planned", "states")

    def __init__(self) -> None:
        self.states: list[mx.array] = []
        self.offset = 0
        self.planned = 0

    def advance(self, length: int, states: list[mx.array]) -> None:
        """The states after `length` more tokens."""
        self.states = states
        self.offset += length

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise TypeError("a recurrent layer has no keys and values")

    def mask(self, length: int) -> Mask:
        return None

    def can_trim(self, count: int) -> bool:
        return count == 0

    def trim(self, count: int) -> None:
        """Raises ValueError for any but no tokens."""
        if count:
            raise ValueError(f"cannot trim {count} tokens of a recurrent state")

    def cut(self) -> None:
        """Nothing: there is no room for tokens to come."""

    def compact(self) -> None:
        """Nothing."""

    def clone(self) -> "RecurrentState":
        other = RecurrentState()
        other.states, other.offset, other.planned = list(self.states), self.offset, self.planned
        return other

    def arrays(self) -> list[mx.array]:
        return list(self.states)

    def state(self) -> LayerState:
        """For `empty_like`."""
        return LayerState("recurrent", self.offset)

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the states of a cache of the same state."""
        self.states = list(arrays)

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be the states."""
        return all(shape and shape[0] == 1 for shape in shapes)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.states)


def make_cache(layer: LayerKv) -> LayerCache:
    """An empty cache of a layer."""
    if layer.is_recurrent:
        return RecurrentState()
    return RotatingKV(layer.window) if layer.window else FullKV()


def empty_like(state: LayerState) -> LayerCache:
    """A cache of this state, whose arrays are still to be filled in. Raises ValueError for one that cannot be."""
    if not 0 <= state.start <= state.offset or (state.kind != "rotating" and state.start):
        raise ValueError(f"a {state.kind} cache of tokens {state.start} to {state.offset}")
    if state.kind == "recurrent":
        recurrent = RecurrentState()
        recurrent.offset = state.offset
        return recurrent
    if state.kind == "full":
        full = FullKV()
        full.offset = state.offset
        return full
    rotating = RotatingKV(state.window)
    rotating.offset, rotating.start = state.offset, state.start
    return rotating


def _are_of(shapes: list[list[int]], tokens: int) -> bool:
    return len(shapes) == 2 and all(len(shape) == 4 and shape[2] == tokens for shape in shapes)


def _rounded(tokens: int) -> int:
    return (tokens + STEP - 1) // STEP * STEP


def _grown(buffer: mx.array | None, used: int, needed: int, like: mx.array) -> mx.array:
    """A buffer with room for `needed` tokens that starts with the `used` first ones of the old one."""
    return _moved(buffer, 0, used, needed - used, like)


def _moved(buffer: mx.array | None, low: int, high: int, more: int, like: mx.array) -> mx.array:
    """A new buffer that starts with tokens `low:high` of the old one and has room for `more` and some."""
    batch, heads, _, dim = like.shape
    kept = high - low
    room = mx.zeros((batch, heads, _rounded(kept + more) - kept, dim), like.dtype)
    return room if buffer is None or kept == 0 else mx.concatenate([buffer[..., low:high, :], room], axis=2)


def _cut(buffer: mx.array | None, used: int) -> mx.array | None:
    """A view of the tokens in use."""
    return buffer if buffer is None or buffer.shape[2] == used else buffer[..., :used, :]


def _compacted(buffer: mx.array | None, used: int) -> mx.array | None:
    """A buffer without its unused end; the old one is freed once the copy is evaluated."""
    if buffer is None or buffer.shape[2] - used <= buffer.shape[2] // 10:
        return buffer
    small = mx.contiguous(buffer[..., :used, :])
    _async_eval(small)
    return small


def _share(buffer: mx.array | None) -> mx.array | None:
    """The same data behind another Python array: item assignment to one must not show in the other."""
    return None if buffer is None else buffer[...]
