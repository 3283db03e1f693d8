"""The cache of one attention layer: keys and values of the tokens seen so far, in order, growing in place.

`FullKV` keeps every token, `RotatingKV` forgets those that no later query of a sliding-window layer can see,
`SplitKV` keeps its first tokens as they come and quantizes the rest. What attention gets of them is an array or, where
they are kept quantized, what `worker.layers.packed` takes.
"""

from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx
import msgspec

from worker.cache.buffer import PLAIN, Form, TokenBuffer
from worker.layers.packed import Joined

Mask = mx.array | str | None


class LayerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a layer's cache is besides its arrays: enough to make it again around them.

    `offset`: tokens seen; the arrays hold those from `start` on. `bits` 0: not quantized; `plain`: so many of the
    first tokens are not.
    """

    kind: Literal["full", "rotating", "recurrent"]
    offset: int
    start: int = 0
    window: int = 0
    bits: int = 0
    group_size: int = 0
    plain: int = 0


class LayerCache(Protocol):
    """What attention and the engine need of a layer's cache. `planned`: see `DecoderModel.make_caches`.

    `goes_back`: every token can be trimmed away again, whatever came after it.
    """

    planned: int
    goes_back: ClassVar[bool]

    @property
    def offset(self) -> int: ...
    def update(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]: ...
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
    def piece(self, begin: int, end: int) -> list[mx.array]: ...
    def assemble(self, pieces: list[list[mx.array]], length: int) -> None: ...
    @property
    def nbytes(self) -> int: ...


class FullKV:
    """Keys and values of every token. `offset`: tokens seen."""

    __slots__ = ("buffer", "offset", "planned")
    goes_back: ClassVar[bool] = True

    def __init__(self, form: Form = PLAIN) -> None:
        self.buffer = TokenBuffer(form)
        self.offset = 0
        self.planned = 0

    def update(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values `[1, H, L, D]`; gives those of all tokens `[1, H, offset, D]`."""
        self.buffer.write(self.offset, keys, values)
        self.offset += keys.shape[2]
        return self.buffer.view(0, self.offset)

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
        self.buffer.cut(self.offset)

    def compact(self) -> None:
        """Give back the room for tokens to come, where it is worth a copy."""
        self.buffer.compact(self.offset)

    def clone(self) -> "FullKV":
        """A copy that shares memory until either side writes."""
        other = FullKV(self.buffer.form)
        other.buffer, other.offset, other.planned = self.buffer.clone(), self.offset, self.planned
        return other

    def arrays(self) -> list[mx.array]:
        """The buffers, for `mx.eval`."""
        return self.buffer.arrays

    def state(self) -> LayerState:
        """For `worker.cache.layers.empty_like`."""
        return LayerState("full", self.offset, **form_facts(self.buffer.form))

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the arrays of a cache of the same state, cut."""
        self.buffer.arrays = list(arrays)

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be those of a cache of this state, cut."""
        return self.buffer.are_arrays(shapes, self.offset)

    def piece(self, begin: int, end: int) -> list[mx.array]:
        """The arrays of the tokens `begin:end`."""
        return [array[..., begin:end, :] for array in self.buffer.arrays]

    def assemble(self, pieces: list[list[mx.array]], length: int) -> None:
        """Be a cache of what some others gave as pieces of `length` tokens, in order."""
        self.buffer.arrays = [mx.concatenate(list(parts), axis=2) for parts in zip(*pieces, strict=True)]
        self.offset = len(pieces) * length

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


class RotatingKV:
    """Keys and values of a sliding-window layer: a query sees itself and `window - 1` tokens before it.

    `start` is the position of the buffer's first token. While a chunk of L tokens is attended the cache holds
    `window - 1 + L` tokens; what is out of every later window is dropped when the buffer would have to grow.
    """

    __slots__ = ("buffer", "offset", "planned", "start", "window")
    goes_back: ClassVar[bool] = False

    def __init__(self, window: int, form: Form = PLAIN) -> None:
        if window < 1:
            raise ValueError(f"a sliding window of {window} tokens")
        self.window = window
        self.buffer = TokenBuffer(form)
        self.offset = 0
        self.start = 0
        self.planned = 0

    def update(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append `[1, H, L, D]`; gives the last `min(offset, window - 1 + L)` tokens, in order."""
        length, first, at = keys.shape[2], self._first_visible(), self.offset - self.start
        has_room = self.buffer.has_room(at, length)
        self.buffer.write(at, keys, values, keep=first - self.start)
        if not has_room:
            self.start = first
        self.offset += length
        return self.buffer.view(first - self.start, self.offset - self.start)

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
        self.buffer.cut(self.offset - self.start)

    def compact(self) -> None:
        """Give back the room for tokens to come, where it is worth a copy."""
        self.buffer.compact(self.offset - self.start)

    def clone(self) -> "RotatingKV":
        """A copy that shares memory until either side writes."""
        other = RotatingKV(self.window, self.buffer.form)
        other.buffer, other.offset, other.planned = self.buffer.clone(), self.offset, self.planned
        other.start = self.start
        return other

    def arrays(self) -> list[mx.array]:
        """The buffers, for `mx.eval`."""
        return self.buffer.arrays

    def state(self) -> LayerState:
        """For `worker.cache.layers.empty_like`."""
        return LayerState("rotating", self.offset, self.start, self.window, **form_facts(self.buffer.form))

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the arrays of a cache of the same state, cut."""
        self.buffer.arrays = list(arrays)

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be those of a cache of this state, cut."""
        return self.buffer.are_arrays(shapes, self.offset - self.start)

    def piece(self, begin: int, end: int) -> list[mx.array]:
        raise TypeError("a window is kept as a state, not in pieces")

    def assemble(self, pieces: list[list[mx.array]], length: int) -> None:
        raise TypeError("a window is kept as a state, not in pieces")

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def _first_visible(self) -> int:
        """Position of the oldest token that the next query sees."""
        return max(0, self.offset - (self.window - 1))


class SplitKV:
    """Keys and values of every token, the first `plain` as they come, the others quantized.

    Which token is kept how depends on its position alone, so that it does not matter in which pieces they came.
    """

    __slots__ = ("first", "plain", "planned", "rest")
    goes_back: ClassVar[bool] = True

    def __init__(self, plain: int, form: Form) -> None:
        self.plain = plain
        self.first, self.rest = FullKV(), FullKV(form)
        self.planned = 0

    @property
    def offset(self) -> int:
        return self.first.offset + self.rest.offset

    def update(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values `[1, H, L, D]`; gives those of all tokens."""
        room = self.plain - self.first.offset
        if room > 0:
            front = self.first.update(keys[..., :room, :], values[..., :room, :])
        else:
            front = self.first.buffer.view(0, self.first.offset)
        if keys.shape[2] <= room:
            return front
        room = max(0, room)
        back = self.rest.update(keys[..., room:, :], values[..., room:, :])
        return Joined(front[0], back[0]), Joined(front[1], back[1])

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
        behind = min(count, self.rest.offset)
        self.rest.trim(behind)
        self.first.trim(count - behind)

    def cut(self) -> None:
        """Have no room for tokens to come."""
        self.first.cut()
        self.rest.cut()

    def compact(self) -> None:
        """Give back the room for tokens to come, where it is worth a copy."""
        self.first.compact()
        self.rest.compact()

    def clone(self) -> "SplitKV":
        """A copy that shares memory until either side writes."""
        other = SplitKV(self.plain, self.rest.buffer.form)
        other.first, other.rest, other.planned = self.first.clone(), self.rest.clone(), self.planned
        return other

    def arrays(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; none of a part that has no tokens."""
        return [array for part in (self.first, self.rest) if part.offset for array in part.arrays()]

    def state(self) -> LayerState:
        """For `worker.cache.layers.empty_like`."""
        return LayerState("full", self.offset, plain=self.plain, **form_facts(self.rest.buffer.form))

    def fill(self, arrays: list[mx.array]) -> None:
        """Take the arrays of a cache of the same state, cut."""
        count = len(arrays) if not self.rest.offset else 2 * self.first.buffer.form.parts
        self.first.fill(arrays[:count])
        self.rest.fill(arrays[count:])

    def holds(self, shapes: list[list[int]]) -> bool:
        """Whether arrays of these shapes can be those of a cache of this state, cut."""
        if not self.rest.offset:
            return self.first.holds(shapes)
        count = 2 * self.first.buffer.form.parts
        return self.first.holds(shapes[:count]) and self.rest.holds(shapes[count:])

    def piece(self, begin: int, end: int) -> list[mx.array]:
        """The arrays of the tokens `begin:end`, which all are kept as they come or all quantized."""
        if end <= self.plain:
            return self.first.piece(begin, end)
        if begin < self.plain:
            raise ValueError(f"tokens {begin} to {end} are kept in two ways, from {self.plain} on another")
        return self.rest.piece(begin - self.plain, end - self.plain)

    def assemble(self, pieces: list[list[mx.array]], length: int) -> None:
        """Be a cache of what some others gave as pieces of `length` tokens, in order."""
        front = pieces[: self.plain // length]
        for part, of_it in ((self.first, front), (self.rest, pieces[len(front) :])):
            if of_it:
                part.assemble(of_it, length)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.rest.nbytes


def form_facts(form: Form) -> dict[str, int]:
    """The fields of `LayerState` that say which form it is."""
    bits = getattr(form, "bits", 0)
    return {"bits": bits, "group_size": form.group_size} if bits and hasattr(form, "group_size") else {}
