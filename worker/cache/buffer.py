"""Tokens of one layer in arrays `[1, H, capacity, …]` that grow in steps, and the form they are kept in.

A decode step writes one slice instead of copying everything. While a clone shares an array, a write copies it first
(mlx's own rule for memory in use elsewhere), so clones are cheap and independent.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from shared.kv_layout import KV_STEP as STEP
from worker.layers.packed import Packed

_async_eval: Any = mx.async_eval  # mlx leaves it untyped


class Form(Protocol):
    """How keys or values are kept: `parts` arrays each."""

    @property
    def parts(self) -> int: ...
    def encode(self, x: mx.array) -> list[mx.array]: ...
    def view(self, parts: list[mx.array]) -> Any: ...


@dataclass(frozen=True, slots=True)
class PlainForm:
    """As they come."""

    parts: int = 1

    def encode(self, x: mx.array) -> list[mx.array]:
        return [x]

    def view(self, parts: list[mx.array]) -> mx.array:
        return parts[0]


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """Packed with a scale and a bias for every `group_size` values of a head."""

    bits: int
    group_size: int
    parts: int = 3

    def encode(self, x: mx.array) -> list[mx.array]:
        return list(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def view(self, parts: list[mx.array]) -> Packed:
        return Packed(parts[0], parts[1], parts[2], self.bits, self.group_size)


PLAIN = PlainForm()


class TokenBuffer:
    """Keys and values `[1, H, tokens, D]` of tokens `0:capacity`, in one form.

    `is_part`: the arrays are parts of greater ones, which live as long as they do.
    """

    __slots__ = ("arrays", "form", "is_part")

    def __init__(self, form: Form = PLAIN) -> None:
        self.form = form
        self.arrays: list[mx.array] = []
        self.is_part = False

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2] if self.arrays else 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def write(self, at: int, keys: mx.array, values: mx.array, *, keep: int = 0) -> None:
        """Put keys and values of some tokens at `at`. Where there is no room the tokens `keep:at` move to the front

        of a greater buffer, and the new ones come behind them.
        """
        new = [*self.form.encode(keys), *self.form.encode(values)]
        length = keys.shape[2]
        if at + length > self.capacity:
            self.arrays = [
                _moved(self.arrays[n] if self.arrays else None, keep, at, length, each)
                for n, each in enumerate(new)
            ]
            at -= keep
            self.is_part = False
        for array, each in zip(self.arrays, new, strict=True):
            array[..., at : at + length, :] = each

    def has_room(self, at: int, length: int) -> bool:
        """Whether `write` would not have to move anything."""
        return at + length <= self.capacity

    def view(self, low: int, high: int) -> tuple[Any, Any]:
        """Keys and values of the tokens `low:high`, as attention takes them."""
        parts = [array[..., low:high, :] for array in self.arrays]
        count = self.form.parts
        return self.form.view(parts[:count]), self.form.view(parts[count:])

    def cut(self, used: int) -> None:
        """Have no room for tokens to come: the next write makes some, and copies only what is used."""
        self.is_part = self.is_part or used < self.capacity
        self.arrays = [array if array.shape[2] == used else array[..., :used, :] for array in self.arrays]

    def compact(self, used: int) -> None:
        """Give back the room for tokens to come, where it is worth a copy, and let go of what the arrays are parts of:
        the bytes of a buffer are those it keeps in memory.
        """
        if self.is_part or self.capacity - used > self.capacity // 10:
            self.arrays = [mx.contiguous(array[..., :used, :]) for array in self.arrays]
            _async_eval(*self.arrays)  # so that the old ones are freed
            self.is_part = False

    def clone(self) -> "TokenBuffer":
        """A copy that shares memory until either side writes."""
        other = TokenBuffer(self.form)
        other.arrays = [
            array[...] for array in self.arrays
        ]  # item assignment to one must not show in the other
        other.is_part = self.is_part
        return other

    def are_arrays(self, shapes: list[list[int]], tokens: int) -> bool:
        """Whether arrays of these shapes can be those of this form for that many tokens."""
        return len(shapes) == 2 * self.form.parts and all(
            len(shape) == 4 and shape[2] == tokens for shape in shapes
        )


def _rounded(tokens: int) -> int:
    return (tokens + STEP - 1) // STEP * STEP


def _moved(buffer: mx.array | None, low: int, high: int, more: int, like: mx.array) -> mx.array:
    """A new buffer that starts with tokens `low:high` of the old one and has room for `more` and some."""
    batch, heads, _, dim = like.shape
    kept = high - low
    room = mx.zeros((batch, heads, _rounded(kept + more) - kept, dim), like.dtype)
    return room if buffer is None or kept == 0 else mx.concatenate([buffer[..., low:high, :], room], axis=2)
