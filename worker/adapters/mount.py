"""Mounting: every tensor of an adapter checked against the model, and nothing of it kept unless all are right.

On the engine thread, which owns the arrays. An adapter is known by a key that its asker chose; rows that run with one
keep it until they end, whatever is unmounted meanwhile.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared.adapter import Adapter, AdapterModule, canonical, inspect_adapter, misfit
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.wire import MountedAdapter
from worker.adapters.selection import AdapterDelta, Low, Selection, Stack
from worker.layers.linear import DenseLinear, Linear, QuantizedLinear

Parts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Held:
    """An adapter in memory. `lows` by the model's own names of modules; `content`: of its numbers and factors."""

    info: MountedAdapter
    lows: dict[str, Low]
    content: str


class Adapters:
    """All adapters of one model. `linears`, `parts`: see `worker.models.LoadedModel`; `dtype`: of the activations."""

    def __init__(self, linears: Mapping[str, Linear], parts: Parts, dtype: mx.Dtype, model: str) -> None:
        self.selection = Selection()
        self._linears, self._parts, self._dtype, self._model = linears, parts, dtype, model
        self._held: dict[str, Held] = {}
        self._leaving: set[str] = set()  # unmounted, and still run by rows
        self._users: Counter[str] = Counter()
        self._shapes = _shapes(linears, parts)

    # ------------------------------------------------------------ mount, unmount

    def mount(self, key: str, path: str) -> MountedAdapter:
        """Raises `Refused` (invalid_request, …) with what is wrong; the model is as it was then. Twice is once."""
        if key in self._held:
            self._leaving.discard(key)
            return self._held[key].info
        if not self._linears:
            raise refuse(
                ErrorCode.UNSUPPORTED, f"{self._model} runs by another provider than native, without adapters"
            )
        try:
            adapter = inspect_adapter(Path(path))
            if problem := misfit(adapter, self._shapes):
                raise _bad(f"{path} does not fit {self._model}: {problem}")
            held = self._read(key, adapter)
        except Refused as refused:
            failure = refused.failure
            if failure.code is ErrorCode.BAD_CHECKPOINT:
                failure = Failure(ErrorCode.INVALID_REQUEST, failure.message, "adapter")
            raise Refused(failure) from None
        self._held[key] = held
        for name, low in held.lows.items():
            linear = self._linears[name]
            if not isinstance(linear.delta, AdapterDelta):
                linear.delta = AdapterDelta(self.selection)
            linear.delta.lows[key] = low
        return held.info

    def unmount(self, key: str) -> bool:
        """Whether it was mounted. Rows that run with it come to their end first."""
        if key not in self._held or key in self._leaving:
            return False
        if self._users[key]:
            self._leaving.add(key)
        else:
            self._drop(key)
        return True

    @property
    def any_held(self) -> bool:
        """Whether a pass has to be told whose rows run with what."""
        return bool(self._held)

    def mounted(self) -> list[MountedAdapter]:
        return [held.info for key, held in self._held.items() if key not in self._leaving]

    def _drop(self, key: str) -> None:
        self._leaving.discard(key)
        for name in self._held.pop(key).lows:
            linear = self._linears[name]
            assert isinstance(linear.delta, AdapterDelta)
            del linear.delta.lows[key]
            if not linear.delta.lows:
                linear.delta = None
        mx.clear_cache()

    # ------------------------------------------------------------ rows

    def check(self, stack: Stack) -> None:
        """Raises `Refused` (conflict, invalid_request) where a row cannot run with these. From any thread."""
        held = [self._held.get(key) for key in stack]
        for key, one in zip(stack, held, strict=True):
            if one is None:
                raise refuse(ErrorCode.CONFLICT, f"adapter {key} is not mounted; try again", param="adapter")
            if one.info.kind == "dora" and len(stack) > 1:
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"adapter {key} is a DoRA, which cannot be added to others; fuse it, or use it alone",
                    param="adapter",
                )

    def acquire(self, stack: Stack) -> str:
        """A row is to run with these -> a name for what they add together. Raises as `check`."""
        self.check(stack)
        self._users.update(stack)
        return "+".join(self._held[key].content for key in stack)

    def release(self, stack: Stack) -> None:
        """A row that was to run with these has ended."""
        for key in stack:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                if key in self._leaving:
                    self._drop(key)

    # ------------------------------------------------------------ reading

    def _read(self, key: str, adapter: Adapter) -> Held:
        """Raises `Refused`."""
        try:
            tensors = mx.load(adapter.weights, format="safetensors")
            assert isinstance(tensors, dict)
            mx.eval(list(tensors.values()))
        except RuntimeError as error:
            raise _bad(f"{adapter.weights}: cannot be read ({str(error).splitlines()[0]})") from None
        for module in adapter.modules.values():
            _check(adapter, module, tensors)
        content = _content(adapter, tensors)
        lows: dict[str, Low] = {}
        for name, module in adapter.modules.items():
            a, b = pair(module, tensors)
            first = a.astype(self._dtype)
            for target, begin, end in self._targets(name, module):
                low = Low(first, b[:, begin:end].astype(mx.float32) * module.scale)
                if module.magnitude:
                    low = self._dora(target, low, tensors[module.magnitude].reshape(-1)[begin:end])
                lows[target] = Low(first, mx.contiguous(low.b.astype(self._dtype)), low.factor, low.rest)
                mx.eval(lows[target].arrays())
        arrays = {id(array): array for low in lows.values() for array in low.arrays()}
        info = MountedAdapter(
            key=key,
            path=adapter.path,
            kind=adapter.kind,
            rank=adapter.rank,
            scale=adapter.scale,
            modules=len(adapter.modules),
            num_bytes=sum(array.nbytes for array in arrays.values()),
        )
        return Held(info, lows, content)

    def _targets(self, name: str, module: AdapterModule) -> list[tuple[str, int, int]]:
        """The model's modules that a module of the adapter means, with their rows of it."""
        own = {canonical(known): known for known in self._linears}
        if name in own:
            return [(own[name], 0, module.shape[0])]
        whole = next(parts for known, parts in self._parts.items() if canonical(known) == name)
        found, begin = [], 0
        for part, rows in whole.items():
            found.append((part, begin, begin + rows))
            begin += rows
        return found

    def _dora(self, name: str, low: Low, magnitude: mx.array) -> Low:
        """With the factor that gives each row of the adapted weight its magnitude (arXiv 2402.09353)."""
        linear = self._linears[name]
        adapted = dense(linear) + (low.a.astype(mx.float32) @ low.b).T
        factor = magnitude.astype(mx.float32) / mx.linalg.norm(adapted, axis=1)
        bias = getattr(linear, "bias", None)
        rest = None if bias is None else (bias.astype(mx.float32) * (1 - factor)).astype(self._dtype)
        return Low(low.a, low.b, factor.astype(self._dtype), rest)


def dense(linear: Linear) -> mx.array:
    """Its weight `[out, in]`, multiplied out, in float32."""
    if isinstance(linear, DenseLinear):
        return linear.weight.astype(mx.float32)
    assert isinstance(linear, QuantizedLinear)
    how = linear.scheme
    plain = mx.dequantize(
        linear.weight,
        linear.scales,
        linear.biases,
        group_size=how.group_size,
        bits=how.bits,
        mode=how.mode,
    )
    return plain.astype(mx.float32)


def pair(module: AdapterModule, tensors: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
    """A [in, rank] and B [rank, out], however they are stored."""
    a, b = tensors[module.a], tensors[module.b]
    return (mx.contiguous(a.T), mx.contiguous(b.T)) if module.by_rows else (a, b)


def _check(adapter: Adapter, module: AdapterModule, tensors: Mapping[str, mx.array]) -> None:
    """The file may be another one than its header was read from."""
    out, ins = module.shape
    a, b = (
        ((module.rank, ins), (out, module.rank))
        if module.by_rows
        else ((ins, module.rank), (module.rank, out))
    )
    for name, shape in ((module.a, a), (module.b, b), (module.magnitude, None)):
        if not name:
            continue
        tensor = tensors.get(name)
        if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
            raise _bad(f"{adapter.weights}: tensor {name} is not what the header said; it was just changed")
        if not bool(mx.all(mx.isfinite(tensor)).item()):
            raise _bad(f"{adapter.weights}: tensor {name} has values that are no numbers; train it anew")


def _content(adapter: Adapter, tensors: Mapping[str, mx.array]) -> str:
    """Another one where any number or factor is."""
    digest = blake2b(digest_size=16)
    for name, module in sorted(adapter.modules.items()):
        digest.update(f"{name}\0{module.rank}\0{module.scale!r}\0{module.by_rows}\0".encode())
        for tensor in (tensors[each] for each in (module.a, module.b, module.magnitude) if each):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            raw: Any = mx.contiguous(tensor).reshape(-1).view(mx.uint8)
            digest.update(memoryview(raw))
    return digest.hexdigest()


def _shapes(linears: Mapping[str, Linear], parts: Parts) -> dict[str, tuple[int, int]]:
    """By canonical name, modules that were split apart too."""
    shapes = {canonical(name): linear.shape for name, linear in linears.items()}
    for name, inside in parts.items():
        first = linears.get(next(iter(inside)))
        if first is not None:
            shapes.setdefault(canonical(name), (sum(inside.values()), first.shape[1]))
    return shapes


def _bad(fault: str) -> Refused:
    return refuse(ErrorCode.INVALID_REQUEST, fault, param="adapter")
