"""Which tokens of a pass run with which adapters, and what that makes of a projection's output.

The product with the base weights is one for all tokens; what adapters add is worked out on the tokens of the rows that
ask for them. A graph is built from top to bottom, so the selection is set before it is and not looked at again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

Stack = tuple[str, ...]
"""Adapters by their keys, in the order in which they are added; () = none."""


@dataclass(frozen=True, slots=True)
class Low:
    """What one adapter adds to one projection: `x` `[..., in]` @ `a` @ `b`, its factor in `b`.

    DoRA: the sum is multiplied by `factor` [out], the base's bias left out of it; `rest` is what that takes off it.
    """

    a: mx.array
    b: mx.array
    factor: mx.array | None = None
    rest: mx.array | None = None

    def over(self, x: mx.array, y: mx.array) -> mx.array:
        y = y + ((x @ self.a) @ self.b).astype(y.dtype)
        if self.factor is not None:
            y = y * self.factor
            if self.rest is not None:
                y = y + self.rest
        return y

    def arrays(self) -> list[mx.array]:
        return [one for one in (self.a, self.b, self.factor, self.rest) if one is not None]


class Selection:
    """The stacks of a pass, each with the places of its tokens; None = all of them."""

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: list[tuple[Stack, mx.array | None]] = []

    def choose(self, parts: Sequence[tuple[Stack, int]]) -> None:
        """`parts`: the stack of each row and the number of its tokens, in the order in which they lie."""
        places: dict[Stack, list[int]] = {}
        begin = 0
        for stack, count in parts:
            if stack:
                places.setdefault(stack, []).extend(range(begin, begin + count))
            begin += count
        self.groups = [
            (stack, None if len(which) == begin else mx.array(which, dtype=mx.int32))
            for stack, which in places.items()
        ]


class AdapterDelta:
    """The `delta` of one projection: what each mounted adapter has for it, by key."""

    __slots__ = ("lows", "selection")

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.lows: dict[str, Low] = {}

    def __call__(self, x: mx.array, y: mx.array) -> mx.array:
        for stack, places in self.selection.groups:
            lows = [low for key in stack if (low := self.lows.get(key)) is not None]
            if not lows:
                continue
            if places is None:
                for low in lows:
                    y = low.over(x, y)
                return y
            inputs, rows = x[places], y[places]
            for low in lows:
                rows = low.over(inputs, rows)
            y[places] = rows
        return y
