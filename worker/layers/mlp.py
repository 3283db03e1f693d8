"""The feed-forward part of a layer."""

import mlx.core as mx

from worker.layers.activations import Activation
from worker.layers.linear import Linear


class GatedMLP:
    """down(act(gate(x)) * up(x)); Shazeer 2020."""

    __slots__ = ("act", "down", "gate", "up")

    def __init__(self, gate: Linear, up: Linear, down: Linear, act: Activation) -> None:
        self.gate, self.up, self.down, self.act = gate, up, down, act

    def __call__(self, x: mx.array) -> mx.array:
        """`x` [T, D] to the same shape."""
        return self.down(self.act(self.gate(x)) * self.up(x))
