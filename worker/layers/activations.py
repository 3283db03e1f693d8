"""Activation functions by their names in `hidden_act`.

Written out, not taken from `mlx.nn`: those are wrapped in `mx.compile`, which calls a C++ compiler on CPU.
"""

import math
from collections.abc import Callable, Mapping

import mlx.core as mx

from shared.errors import ErrorCode, refuse

_TWO = mx.array(2.0)

Activation = Callable[[mx.array], mx.array]


def exp2(x: mx.array) -> mx.array:
    """2^x. On CPU mlx takes less than half the time for a power that it takes for `mx.exp`."""
    return mx.power(_TWO, x)


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    if x.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.cpu:
        return x / (1 + exp2(x * -math.log2(math.e)))
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """x * Phi(x), exactly."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) * 0.5


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of `gelu`."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_BY_NAME: Mapping[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


def activation(name: str) -> Activation:
    """The function a config names. Raises `Refused` (unsupported)."""
    if name not in _BY_NAME:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"config.json: hidden_act {name!r} is not supported; known are {', '.join(_BY_NAME)}",
        )
    return _BY_NAME[name]
