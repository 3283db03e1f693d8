"""The caches of mlx-lm's model classes as the engine knows caches: one of ours around each of theirs.

They live in memory only: what they hold is theirs to know, so nothing of it goes to disk.
"""

import copy
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from shared.kv_layout import LayerKv
from worker.cache.kv import LayerCache, LayerState, Mask

_KEEPS_ALL = ("KVCache", "ConcatenateKVCache")
_MAY_GO_BACK = (*_KEEPS_ALL, "RotatingKVCache")


class PromptState:
    """A cache that cannot go back to every token: a window that turns, a recurrent state, or both in one."""

    __slots__ = ("inner", "offset", "planned")
    goes_back: ClassVar[bool] = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.offset = 0
        self.planned = 0

    def advance(self, length: int) -> None:
        """The model has run so many tokens through `inner`."""
        self.offset += length

    def can_trim(self, count: int) -> bool:
        """Whether the last `count` tokens can be forgotten."""
        if count == 0:
            return True
        exact = all(type(one).__name__ in _MAY_GO_BACK for one in _parts(self.inner))
        return exact and 0 < count <= self.offset and bool(self.inner.is_trimmable())

    def trim(self, count: int) -> None:
        """Forget the last `count` tokens. Raises ValueError where `can_trim` says no."""
        if not self.can_trim(count):
            raise ValueError(f"cannot trim {count} of {self.offset} tokens of a {type(self.inner).__name__}")
        if count:
            self.inner.trim(count)
            self.offset -= count

    def clone(self) -> LayerCache:
        """A copy that shares memory until either side writes."""
        other = type(self)(
            copy.deepcopy(self.inner)
        )  # copies arrays by reference, see mlx.core.array.__deepcopy__
        other.offset, other.planned = self.offset, self.planned
        return other

    def arrays(self) -> list[mx.array]:
        """Everything that `inner` holds, for `mx.eval`."""
        return _arrays([one.state for one in _parts(self.inner)])

    @property
    def nbytes(self) -> int:
        """All of the buffers, those of a longer conversation too that this one was branched off."""
        return sum(array.nbytes for one in _parts(self.inner) for array in _arrays(list(vars(one).values())))

    def cut(self) -> None:
        """Nothing: how `inner` makes room is its own affair."""

    def compact(self) -> None:
        """Nothing: the room for tokens to come is at most one step."""

    def update(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        raise TypeError("the layers of mlx-lm write their caches themselves")

    def mask(self, length: int) -> Mask:
        raise TypeError("the layers of mlx-lm make their masks themselves")

    def state(self) -> LayerState:
        raise TypeError(f"a {type(self.inner).__name__} of mlx-lm is kept in memory only")

    def fill(self, arrays: list[mx.array]) -> None:
        raise TypeError(f"a {type(self.inner).__name__} of mlx-lm is kept in memory only")

    def holds(self, shapes: list[list[int]]) -> bool:
        return False

    def piece(self, begin: int, end: int) -> list[mx.array]:
        raise TypeError(f"a {type(self.inner).__name__} of mlx-lm is kept in memory only")

    def assemble(self, pieces: list[list[mx.array]], length: int) -> None:
        raise TypeError(f"a {type(self.inner).__name__} of mlx-lm is kept in memory only")


class PromptTokens(PromptState):
    """A cache that keeps every token."""

    __slots__ = ()
    goes_back: ClassVar[bool] = True


def wrapped(inner: Any) -> PromptState:
    """One of ours around one of mlx-lm's caches, empty."""
    keeps_all = all(type(one).__name__ in _KEEPS_ALL for one in _parts(inner))
    return PromptTokens(inner) if keeps_all else PromptState(inner)


def measured(caches: list[PromptState]) -> list[LayerKv]:
    """What caches that have seen a token hold of each, by the shapes of their arrays; one entry a cache of mlx-lm."""
    return [_layer_of(one) for cache in caches for one in _parts(cache.inner)]


def _layer_of(inner: Any) -> LayerKv:
    keys, values = getattr(inner, "keys", None), getattr(inner, "values", None)
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        window = getattr(inner, "max_size", None) or getattr(inner, "chunk_size", None) or 0
        return LayerKv(keys.shape[1], keys.shape[3], window=window, value_dim=values.shape[3])
    held = _arrays(inner.state)
    wide = sum(state.size for state in held if state.dtype == mx.float32)
    return LayerKv(0, 0, state=sum(state.size for state in held) - wide, state32=wide)


def _arrays(tree: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(tree)  # typed as if it could be a dict
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def _parts(inner: Any) -> list[Any]:
    """A cache of several, as some layers have it, taken apart."""
    several = getattr(inner, "caches", None)
    if several is None:
        return [inner]
    return [part for one in several for part in _parts(one)]
