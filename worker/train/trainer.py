"""Training step by step: draws a batch, measures, moves the adapter. Knows no disk and no job.

Everything that a step depends on is in `snapshot`: restored on the same data, steps go on to the same bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from shared.errors import ErrorCode, refuse
from shared.lab import Finetune
from worker.datasets.batches import Packed, group, order_of, pack, padded_width
from worker.datasets.examples import Example
from worker.train.adapter import Arrays
from worker.train.gradients import Graph, Loss
from worker.train.losses import (
    Scored,
    dpo,
    log_probabilities,
    mean_cross_entropy,
    orpo,
    row_sums,
)
from worker.train.optimizer import clip, learning_rate, moments_of, norm_of, update
from worker.train.rows import batch_of

Rows = Sequence[Sequence[Example]]
"""The examples of each row of a data set: one, or the chosen and the rejected one."""

PREFIXES = ("adapter", "first", "second", "held")


@dataclass(frozen=True)
class Measured:
    """Of a step, or of an evaluation. `tokens`: that the loss is over. `norm`: of the gradient, at an update."""

    loss: float
    tokens: int
    norm: float | None = None
    accuracy: float | None = None
    margin: float | None = None


class Trainer:
    """`step`: the last one that is done. `arrays`: the adapter as it is."""

    def __init__(self, graph: Graph, spec: Finetune, train: Rows, valid: Rows, arrays: Arrays) -> None:
        """Raises `Refused` (invalid_request) where there are too few rows."""
        self.graph, self.spec, self.arrays = graph, spec, arrays
        self._train, self._valid = train, valid
        self._groups = self._grouped(train)
        if not self._groups:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"batch_size {spec.batch_size} asks for more rows than the {len(train)} that can be trained on",
                param="batch_size",
            )
        self._valid_groups = self._grouped(valid)
        self._order = order_of(len(self._groups), spec.seed)
        self._moments = moments_of(arrays)
        self._held: Arrays | None = None
        self._held_steps = 0
        self._references: dict[tuple[str, int], mx.array] = {}
        self._drawn: int | None = None
        self._position = self._order.state()
        self.step = self.tokens = 0

    @property
    def can_evaluate(self) -> bool:
        return bool(self._valid_groups)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def draw(self) -> None:
        """Choose the batch of the next step, if it is not chosen. mlx-lm does so before it evaluates."""
        if self._drawn is None:
            self._drawn = self._order.next()

    def take_step(self) -> Measured:
        """Raises `Refused` (engine_fault) where the loss is no number."""
        spec, step = self.spec, self.step + 1
        self.draw()
        assert self._drawn is not None
        examples = self._examples(self._train, self._groups[self._drawn])
        packed = self._packed(examples)
        adapter = self.graph.adapter
        adapter.begin_step(step)
        reference = self._reference("train", self._drawn, packed)
        value, told, grads = self.graph.value_and_grad(
            batch_of(self.graph.model.layout, packed.rows),
            self._loss(packed, reference),
            self.arrays,
            by_layer=spec.grad_checkpoint,
            segment=spec.segment_size,
        )
        held = self._held
        total = grads if held is None else {name: held[name] + grads[name] for name in grads}
        steps = self._held_steps + 1
        norm = None
        if step % spec.grad_accumulation_steps == 0 or step == spec.iters:
            if steps > 1:
                total = {name: one / steps for name, one in total.items()}
            norm = norm_of(total)
            arrays, moments = update(
                self.arrays,
                clip(total, norm, spec.grad_clip_norm),
                self._moments,
                spec,
                learning_rate(spec, step),
            )
            mx.eval(value, told, norm, arrays, moments)
            held, steps = None, 0
        else:
            arrays, moments, held = self.arrays, self._moments, total
            mx.eval(value, told, held)
        measured = _measured(value, told, packed, norm)
        if not math.isfinite(measured.loss):
            raise refuse(
                ErrorCode.ENGINE_FAULT,
                f"the loss of step {step} is {measured.loss}: choose a lower learning_rate, or look at the data",
            )
        # Only now, so that a step that failed halfway left nothing.
        self.arrays, self._moments, self._held, self._held_steps = arrays, moments, held, steps
        adapter.arrays = arrays
        self.step, self.tokens, self._drawn = step, self.tokens + measured.tokens, None
        self._position = self._order.state()
        return measured

    def evaluate(self, between: Callable[[], None]) -> Measured:
        """Over the rows that are held out, at most `val_max_examples`; `between` is called before each batch."""
        adapter, spec = self.graph.adapter, self.spec
        self.draw()
        if spec.like_mlx_lm:
            self._order.skip(len(self._valid_groups))
        adapter.begin_step(None)
        places: Sequence[int] = range(len(self._valid_groups))
        most = -(-spec.val_max_examples // spec.batch_size) if spec.val_max_examples else len(places)
        if most < len(places):  # always the same ones, of all lengths
            places = sorted(np.random.RandomState(0).permutation(len(places))[:most].tolist())
        parts: list[tuple[int, Measured]] = []
        for place in places:
            between()
            packed = self._packed(self._examples(self._valid, self._valid_groups[place]))
            reference = self._reference("valid", place, packed)
            adapter.arrays = self.arrays
            value, told = self._loss(packed, reference)(
                self.graph.hidden(batch_of(self.graph.model.layout, packed.rows))
            )
            mx.eval(value, told)
            found = _measured(value, told, packed, None)
            parts.append((found.tokens if spec.method == "sft" else len(packed.rows), found))
        weight = sum(count for count, _ in parts)

        def mean(get: Callable[[Measured], float | None]) -> float:
            return sum(count * (get(one) or 0.0) for count, one in parts) / weight

        tokens = sum(one.tokens for _, one in parts)
        if spec.method == "sft":
            return Measured(mean(lambda one: one.loss), tokens)
        return Measured(
            mean(lambda one: one.loss),
            tokens,
            accuracy=mean(lambda one: one.accuracy),
            margin=mean(lambda one: one.margin),
        )

    # ------------------------------------------------------------ going on later

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """After the last step: arrays, and plain values."""
        parts = (self.arrays, *self._moments, self._held or {})
        arrays = {
            f"{prefix}.{name}": one
            for prefix, part in zip(PREFIXES, parts, strict=True)
            for name, one in part.items()
        }
        values = {"step": self.step, "tokens": self.tokens, "held_steps": self._held_steps}
        return arrays, {**values, "position": self._position}

    def restore(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go on from a snapshot of a trainer of the same spec and data. Raises KeyError, ValueError where it is not."""
        parts: dict[str, Arrays] = {prefix: {} for prefix in PREFIXES}
        for name, one in arrays.items():
            prefix, _, rest = name.partition(".")
            parts[prefix][rest] = one
        for prefix in PREFIXES[:3]:
            shapes = {name: one.shape for name, one in parts[prefix].items()}
            if shapes != {name: one.shape for name, one in self.arrays.items()}:
                raise ValueError(f"its {prefix} arrays are of another adapter")
        self._order.restore(values["position"])
        self.arrays = {name: parts["adapter"][name] for name in self.arrays}
        self._moments = (parts["first"], parts["second"])
        self._held, self._held_steps = parts["held"] or None, int(values["held_steps"])
        self.step, self.tokens = int(values["step"]), int(values["tokens"])
        self._position, self._drawn = self._order.state(), None

    # ------------------------------------------------------------ inside

    def _grouped(self, rows: Rows) -> list[list[int]]:
        lengths = [sum(len(one.tokens) for one in row) for row in rows]
        return group(lengths, self.spec.batch_size, like_mlx_lm=self.spec.like_mlx_lm)

    def _examples(self, rows: Rows, places: Sequence[int]) -> list[Example]:
        return [one for place in places for one in rows[place]]

    def _packed(self, examples: Sequence[Example]) -> Packed:
        spec = self.spec
        width = padded_width(examples, spec.max_seq_length) if spec.like_mlx_lm else 0
        response = spec.sft_scope == "response" or spec.method == "dpo"
        return pack(examples, response=response, padded_to=width)

    def _loss(self, packed: Packed, reference: mx.array | None) -> Loss:
        spec, head, scored = self.spec, self.graph.model.head, scored_of(packed)

        def sft(hidden: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
            return mean_cross_entropy(head, hidden, scored, spec.head_chunk), {}

        def preference(hidden: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
            found = log_probabilities(head, hidden, scored, spec.head_chunk)
            sums = row_sums(found, packed.answers)
            if reference is not None:
                return dpo(sums, reference, spec.dpo_beta)
            lengths = mx.array([end - begin for begin, end in packed.answers])
            chosen = packed.spans[0::2]
            nll = -row_sums(found, chosen).sum() / sum(end - begin for begin, end in chosen)
            return orpo(sums, lengths, nll, spec.orpo_lambda)

        return sft if spec.method == "sft" else preference

    def _reference(self, of: str, place: int, packed: Packed) -> mx.array | None:
        """What the model without the adapter says of the responses; it never changes, so it is asked once a batch."""
        if self.spec.method != "dpo":
            return None
        if (of, place) not in self._references:
            self.graph.adapter.arrays = None
            hidden = self.graph.hidden(batch_of(self.graph.model.layout, packed.rows))
            found = log_probabilities(self.graph.model.head, hidden, scored_of(packed), self.spec.head_chunk)
            self._references[of, place] = row_sums(found, packed.answers)
            mx.eval(self._references[of, place])
        return self._references[of, place]


def scored_of(packed: Packed) -> Scored:
    """The same as arrays."""
    places = None if packed.counts_all else mx.array(packed.places)
    return Scored(places, mx.array(packed.targets))


def _measured(value: mx.array, told: dict[str, mx.array], packed: Packed, norm: mx.array | None) -> Measured:
    extra = {name: _number(one) for name, one in told.items()}
    return Measured(
        _number(value), len(packed.targets), norm=None if norm is None else _number(norm), **extra
    )


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]  # mlx says it may be complex
