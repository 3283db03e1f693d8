"""Which module gets how many bits: as little divergence as possible for the bits that there are. Pure.

Greedy on what a byte buys, along the lower hull of what each module's divergence is at each size; as if divergences of
modules added up, which they nearly do while they are small (Dong et al. 2019, Sensitivity-aware mixed precision). First
come floors, as far as they fit: no more than `MAX_LOW_RUN` layers in a row without any module above the least bits, and
in each layer `FLOOR` modules above it, of attention if there are many. Where a few calibration texts may mislead
(embeddings, head, the first and the last layer, experts that all tokens go through) a divergence counts `PROTECTION`
times.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR = 2
FLOOR_OF_ATTENTION_FROM = 4
MAX_LOW_RUN = 3
PROTECTION = 2.0


@dataclass(frozen=True)
class Choice:
    """One module: its bytes and its divergence by bits. `layer` None: outside of all layers."""

    module: str
    sizes: Mapping[int, int]
    divergences: Mapping[int, float]
    layer: int | None = None
    is_attention: bool = False
    is_protected: bool = False


class OutOfReach(Exception):
    """The budget is below the least, or above the most, that the candidates can come to. `least`, `most`: bytes."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(f"between {least} and {most} bytes")
        self.least, self.most = least, most


def allocate(choices: Sequence[Choice], budget: float) -> dict[str, int]:
    """Bits of each module, whose sizes come to at most `budget` bytes. Raises `OutOfReach`."""
    least = sum(min(one.sizes.values()) for one in choices)
    most = sum(max(one.sizes.values()) for one in choices)
    if not least <= budget <= most:
        raise OutOfReach(least, most)
    filling = _Filling(choices, budget)
    for group, count in (*_low_runs(choices), *_floors(choices)):
        filling.raise_to(group, count)
    filling.fill()
    return filling.bits


class _Filling:
    """What is chosen so far, and what it takes."""

    def __init__(self, choices: Sequence[Choice], budget: float) -> None:
        self.hulls = {one.module: hull(one) for one in choices}
        self.choices = {one.module: one for one in choices}
        self.bits = {one.module: min(one.sizes) for one in choices}
        self.left = budget - sum(one.sizes[self.bits[one.module]] for one in choices)

    def steps(self, module: str) -> list[tuple[float, int]]:
        """(what a byte buys, bits) of the next steps of a module, from the next one on."""
        one, now = self.choices[module], self.bits[module]
        curve, at = self.hulls[module]
        found = []
        for bits in at:
            if bits > now:
                paid = one.sizes[bits] - one.sizes[now]
                found.append(((curve[now] - curve[bits]) / paid, bits))
        return found

    def take(self, module: str, bits: int) -> bool:
        """Give a module so many bits, if they fit."""
        sizes = self.choices[module].sizes
        paid = sizes[bits] - sizes[self.bits[module]]
        if paid > self.left:
            return False
        self.left -= paid
        self.bits[module] = bits
        return True

    def raise_to(self, modules: Sequence[str], count: int) -> None:
        """Where fewer than `count` of these are above their least, raise the one that buys most a byte to its next
        bits, or the next best that fits.
        """
        low = [module for module in modules if self.bits[module] == min(self.choices[module].sizes)]
        if len(modules) - len(low) >= count:
            return
        ranked = sorted(low, key=lambda module: (-self._next(module)[0], module))
        for module in ranked:
            if self.take(module, self._next(module)[1]):
                return

    def _next(self, module: str) -> tuple[float, int]:
        """What one step up buys a byte, and to which bits; also where it buys nothing."""
        one, now = self.choices[module], self.bits[module]
        above = min((bits for bits in one.sizes if bits > now), default=now)
        curve, _ = self.hulls[module]
        return (curve[now] - curve[above]) / max(1, one.sizes[above] - one.sizes[now]), above

    def fill(self) -> None:
        """Buy where it buys most, until nothing fits or nothing is gained."""
        heap = [(-value, module, bits) for module in self.bits for value, bits in self.steps(module)[:1]]
        heapq.heapify(heap)
        while heap:
            value, module, bits = heapq.heappop(heap)
            if value >= 0:
                break
            if self.take(module, bits):
                for value, bits in self.steps(module)[:1]:
                    heapq.heappush(heap, (-value, module, bits))
            else:
                self._take_part(module, bits)

    def _take_part(self, module: str, most: int) -> None:
        """The largest step below `most` that fits and buys something."""
        curve, _ = self.hulls[module]
        now = self.bits[module]
        for bits in sorted(self.choices[module].sizes, reverse=True):
            if now < bits < most and curve[bits] < curve[now] and self.take(module, bits):
                return


def hull(choice: Choice) -> tuple[dict[int, float], list[int]]:
    """-> (the divergence that counts at each bits, the bits on the lower hull of it over sizes).

    More bits never count as worse, and what is no number counts as ten times the worst that is one.
    """
    known = [value for value in choice.divergences.values() if math.isfinite(value)]
    worst = 10 * max(known, default=1.0)
    factor = PROTECTION if choice.is_protected else 1.0
    curve: dict[int, float] = {}
    lowest = math.inf
    for bits in sorted(choice.sizes):
        value = choice.divergences[bits]
        lowest = min(lowest, max(0.0, value) if math.isfinite(value) else worst)
        curve[bits] = factor * lowest
    points: list[int] = []
    for bits in sorted(choice.sizes):
        while len(points) > 1 and _above(choice, curve, points[-2], points[-1], bits):
            points.pop()
        points.append(bits)
    return curve, points


def _above(choice: Choice, curve: Mapping[int, float], first: int, middle: int, last: int) -> bool:
    """Whether the middle one of three sizes lies on or above the line between the others."""
    run, rise = choice.sizes[last] - choice.sizes[first], curve[last] - curve[first]
    return (curve[middle] - curve[first]) * run >= rise * (choice.sizes[middle] - choice.sizes[first])


def _by_layer(choices: Sequence[Choice]) -> list[list[Choice]]:
    layers: dict[int, list[Choice]] = {}
    for one in choices:
        if one.layer is not None:
            layers.setdefault(one.layer, []).append(one)
    return [layers[number] for number in sorted(layers)]


def _low_runs(choices: Sequence[Choice]) -> list[tuple[list[str], int]]:
    """Modules of which so many have to be above the least: of every so many layers one of the last one's."""
    layers = _by_layer(choices)
    return [([one.module for one in layer], 1) for layer in layers[MAX_LOW_RUN :: MAX_LOW_RUN + 1]]


def _floors(choices: Sequence[Choice]) -> list[tuple[list[str], int]]:
    """The same of the floors of each layer, the first module of all layers before the second of any."""
    found = []
    for count in range(1, FLOOR + 1):
        for layer in _by_layer(choices):
            attention = [one for one in layer if one.is_attention]
            among = attention if len(layer) >= FLOOR_OF_ATTENTION_FROM and attention else layer
            found.append(([one.module for one in among], count))
    return found
