"""Hidden states to one vector a text, as `Sentence` says: of a padded group at once, or of a text piece by piece."""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from worker.embed.sentence import DenseSpec, Sentence
from worker.layers.linear import DenseLinear

Step = Callable[[mx.array], mx.array]
"""`[..., D]` to `[..., E]`, float32."""


class Head:
    """What stands behind a model of width `width`. Make it on the thread that runs the model."""

    def __init__(self, sentence: Sentence, width: int) -> None:
        self.sentence = sentence
        self.width = width * len(sentence.pooling)
        self.steps: list[Step] = []
        for spec in sentence.dense:
            if spec.in_features != self.width:
                raise refuse(
                    ErrorCode.BAD_CHECKPOINT,
                    f"{spec.folder}: takes {spec.in_features} values, but {self.width} come to it",
                )
            self.steps.append(_dense(spec))
            self.width = spec.out_features

    def collector(self, dimensions: int) -> "Collector":
        """For a text that comes in pieces; `dimensions` as in `cut`."""
        return Collector(self, cut(dimensions))

    def pool(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        """Vectors [B, E], float32, of texts whose hidden states [B, L, D] are padded on the right."""
        pools = {"last": _last, "cls": _first, "mean": _mean, "max": _max, "mean_sqrt_len": _mean_sqrt}
        hidden, count = hidden.astype(mx.float32), mx.array(list(lengths))
        return self.finish(_joined([pools[mode](hidden, count) for mode in self.sentence.pooling]))

    def finish(self, pooled: mx.array) -> mx.array:
        """From pooled [..., D] on."""
        for step in self.steps:
            pooled = step(pooled)
        return unit(pooled) if self.sentence.normalize else pooled


class Collector:
    """The hidden states of one text as they come in pieces: what pooling needs of them, and no more."""

    def __init__(self, head: Head, then: Step) -> None:
        """`then`: what follows the head."""
        self.head, self.then = head, then
        self.count = 0
        self.parts: dict[str, mx.array] = {}

    def fresh(self) -> "Collector":
        """The same for a text that begins again."""
        return Collector(self.head, self.then)

    def take(self, hidden: mx.array) -> None:
        """The next piece [L, D]."""
        hidden = hidden.astype(mx.float32)
        self.count += hidden.shape[0]
        for mode in self.head.sentence.pooling:
            if mode == "last" or (mode == "cls" and mode not in self.parts):
                self.parts[mode] = hidden[-1 if mode == "last" else 0]
            elif mode == "max":
                most = hidden.max(axis=0)
                self.parts[mode] = mx.maximum(self.parts[mode], most) if mode in self.parts else most
            elif mode.startswith("mean"):
                self.parts[mode] = self.parts.get(mode, mx.array(0.0)) + hidden.sum(axis=0)

    def arrays(self) -> list[mx.array]:
        """What it holds."""
        return list(self.parts.values())

    def result(self) -> mx.array:
        """The vector [E], float32, once all pieces are there."""
        scale: Mapping[str, float] = {"mean": self.count, "mean_sqrt_len": self.count**0.5}
        pooled = [self.parts[mode] / scale.get(mode, 1.0) for mode in self.head.sentence.pooling]
        return self.then(self.head.finish(_joined(pooled)))


def unit(x: mx.array) -> mx.array:
    """Each vector of the last axis at length 1."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def cut(dimensions: int) -> Step:
    """The first so many values at length 1 again (Matryoshka); 0 = as they are."""
    return lambda x: unit(x[..., :dimensions]) if dimensions else x


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _is_text(hidden: mx.array, count: mx.array) -> mx.array:
    return (mx.arange(hidden.shape[1])[None] < count[:, None])[..., None]


def _first(hidden: mx.array, count: mx.array) -> mx.array:
    return hidden[:, 0]


def _last(hidden: mx.array, count: mx.array) -> mx.array:
    return hidden[mx.arange(hidden.shape[0]), count - 1]


def _sum(hidden: mx.array, count: mx.array) -> mx.array:
    return mx.where(_is_text(hidden, count), hidden, 0.0).sum(axis=1)


def _mean(hidden: mx.array, count: mx.array) -> mx.array:
    return _sum(hidden, count) / count[:, None]


def _mean_sqrt(hidden: mx.array, count: mx.array) -> mx.array:
    return _sum(hidden, count) / mx.sqrt(count.astype(mx.float32))[:, None]


def _max(hidden: mx.array, count: mx.array) -> mx.array:
    return mx.where(_is_text(hidden, count), hidden, -mx.inf).max(axis=1)


def _dense(spec: DenseSpec) -> Step:
    """The projection of a folder, in float32. Raises `Refused`."""
    file = spec.folder / "model.safetensors"
    if not file.is_file():
        raise refuse(
            ErrorCode.BAD_CHECKPOINT, f"{spec.folder}: no model.safetensors; PyTorch files are not read"
        )
    try:
        found = mx.load(str(file), format="safetensors")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file}: cannot be read ({reason})") from None
    assert isinstance(found, dict)
    names = ("linear.weight", "linear.bias") if spec.bias else ("linear.weight",)
    shapes = ((spec.out_features, spec.in_features), (spec.out_features,))
    for name, shape in zip(names, shapes, strict=False):
        if name not in found or tuple(found[name].shape) != shape:
            raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file}: no tensor {name} of shape {list(shape)}")
    tensors = [found[name].astype(mx.float32) for name in names]
    mx.eval(tensors)
    linear = DenseLinear(*tensors)
    return (lambda x: mx.tanh(linear(x))) if spec.activation == "Tanh" else linear
