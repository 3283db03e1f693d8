"""The cache of one recurrent layer (convolution, delta net): a state that does not grow."""

from typing import Any, ClassVar

import mlx.core as mx

from worker.cache.kv import LayerState, Mask

_async_eval: Any = mx.async_eval  # mlx leaves it untyped


class RecurrentState:
    """What a recurrent layer knows of all tokens before: arrays of a fixed size, the same for every length.

    The layer reads `states` and puts others in their place with `advance`; it never writes into one, so that clones
    share them. There is no way back to an earlier token.
    """

    __slots__ = ("offset", "planned", "states")
    goes_back: ClassVar[bool] = False

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
        """Let go of the states of rows that were stepped together with this one; the copies are small."""
        self.states = [mx.contiguous(one) for one in self.states]
        _async_eval(*self.states)

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

    def piece(self, begin: int, end: int) -> list[mx.array]:
        raise TypeError("a recurrent layer keeps no tokens")

    def assemble(self, pieces: list[list[mx.array]], length: int) -> None:
        raise TypeError("a recurrent layer keeps no tokens")

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.states)
