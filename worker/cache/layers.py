"""The caches of a row's layers: made from a model's layout, or made again from what was written of them."""

from collections.abc import Sequence

from shared.kv_layout import LayerKv
from worker.cache.buffer import PLAIN, Form, QuantizedForm
from worker.cache.kv import FullKV, LayerCache, LayerState, RotatingKV, SplitKV
from worker.cache.recurrent import RecurrentState


def make_caches(layout: Sequence[LayerKv], planned: int = 0) -> list[LayerCache]:
    """Empty caches, one a layer. `planned`: see `DecoderModel.make_caches`."""
    caches: list[LayerCache] = []
    for layer in layout:
        if layer.is_recurrent:
            cache: LayerCache = RecurrentState()
        else:
            cache = _attention_cache(layer.window, layer.bits, layer.group_size, layer.plain)
        cache.planned = planned
        caches.append(cache)
    return caches


def empty_like(state: LayerState) -> LayerCache:
    """A cache of this state, whose arrays are still to be filled in. Raises ValueError for one that cannot be."""
    if not 0 <= state.start <= state.offset or (state.kind != "rotating" and state.start):
        raise ValueError(f"a {state.kind} cache of tokens {state.start} to {state.offset}")
    if state.kind == "recurrent":
        recurrent = RecurrentState()
        recurrent.offset = state.offset
        return recurrent
    cache = _attention_cache(state.window, state.bits, state.group_size, state.plain)
    if isinstance(cache, SplitKV):
        cache.first.offset = min(state.plain, state.offset)
        cache.rest.offset = state.offset - cache.first.offset
    else:
        cache.offset = state.offset
    if isinstance(cache, RotatingKV):
        cache.start = state.start
    return cache


def _attention_cache(window: int, bits: int, group_size: int, plain: int) -> FullKV | RotatingKV | SplitKV:
    form: Form = QuantizedForm(bits, group_size) if bits else PLAIN
    if window:
        return RotatingKV(window, form)
    return SplitKV(plain, form) if bits and plain else FullKV(form)
