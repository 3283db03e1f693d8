"""mlx-lm's model classes as a model of the engine: every architecture it has, driven by our scheduler.

mlx-lm is imported here and nowhere else, only in the worker of a model that needs it, and takes a second or two (it
brings transformers along). Its classes take one sequence with its own caches; so each row of a step is a call of its
own, and only the head sees all rows at once.
"""

import resource
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, refuse
from shared.kv_layout import LayerKv
from shared.providers import INSTALL
from worker.cache.kv import LayerCache
from worker.layers.batch import Batch
from worker.providers.mlx_lm_cache import PromptState, measured, wrapped
from worker.weights import Progress, materialise

_TRUNKS = ("model", "transformer", "backbone")
_PROBE = (1, 2, 3)


class MlxLmModel:
    """`worker.models.DecoderModel` says what its methods promise.

    `trunk`: where the layers are, if what is behind them can be run apart; else what stands for hidden states are
    the logits.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.trunk = _trunk_of(model)
        self.layout: Sequence[LayerKv] = ()

    def __call__(self, batch: Batch) -> mx.array:
        found = []
        for row in batch.rows:
            found.append(self._run(batch.tokens[row.begin : row.end], row.caches))
            for cache in row.caches:
                cache.advance(row.length)
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def head(self, hidden: mx.array) -> mx.array:
        if self.trunk is None:
            return hidden
        owner, name = self.trunk
        known = _Instead(getattr(owner, name), answer=hidden[None])
        logits: mx.array = type(owner).__call__(
            _Instead(owner, {name: known}), mx.zeros((1, hidden.shape[0]), mx.int32)
        )
        return logits[0]

    def make_caches(self, length: int = 0) -> list[LayerCache]:
        from mlx_lm.models.cache import make_prompt_cache

        caches = [wrapped(one) for one in make_prompt_cache(self.model)]
        for cache in caches:
            cache.planned = length
        return list(caches)

    def regime(self, length: int) -> Hashable:
        """All the same: mlx-lm chooses its rotation when the model is loaded."""
        return ()

    def settle(self) -> None:
        """Try the model on a few tokens: whether the head can be run apart, and what its caches hold."""
        ids = mx.array(_PROBE, dtype=mx.int32)
        caches = self.make_caches()
        whole = self.model(ids[None], cache=[_inner(cache) for cache in caches])[0]
        if self.trunk is not None:
            try:
                apart = self.head(self._run(ids, self.make_caches()))
                if not mx.allclose(apart, whole, rtol=1e-3, atol=1e-3).item():
                    self.trunk = None
            except (TypeError, ValueError, AttributeError, KeyError, IndexError):
                self.trunk = None
        mx.eval(whole)
        self.layout = measured([cache for cache in caches if isinstance(cache, PromptState)])

    def _run(self, tokens: mx.array, caches: Sequence[LayerCache]) -> mx.array:
        run = self.model if self.trunk is None else getattr(*self.trunk)
        found: mx.array = run(tokens[None], cache=[_inner(cache) for cache in caches])
        return found[0]


class _Instead:
    """Has the attributes of another object, some of them others. With `answer` a call gives that."""

    def __init__(self, inner: Any, others: dict[str, Any] | None = None, *, answer: Any = None) -> None:
        self._inner, self._others, self._answer = inner, others or {}, answer

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer


def _inner(cache: LayerCache) -> Any:
    assert isinstance(cache, PromptState)
    return cache.inner


def _trunk_of(model: Any) -> tuple[Any, str] | None:
    """The module that holds the layers, by its owner and name; None where none has a known name."""
    owner = model
    while "language_model" in owner:
        owner = owner["language_model"]
    return next(((owner, name) for name in _TRUNKS if name in owner and callable(owner[name])), None)


def load(checkpoint: Checkpoint, dtype: mx.Dtype, on_progress: Progress | None) -> tuple[MlxLmModel, int]:
    """-> (the model, bytes of its weights). Raises `Refused` (bad_checkpoint, unsupported), with mlx-lm's words."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        from mlx_lm.utils import load_config, load_model
    except Exception as error:  # what it imports is not ours
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{checkpoint.path}: mlx-lm is installed and cannot be imported ({type(error).__name__}: {error}); "
            f"mend it with {INSTALL}, or choose another provider",
            param="provider",
        ) from error

    soft, hard = limits[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft if hard < 0 else min(soft, hard), hard)
    )  # mlx-lm lowers it
    path = Path(checkpoint.path)
    try:
        extra = both_dialects(load_config(path), checkpoint.config)
        model, _ = load_model(path, lazy=True, model_config=extra)
        size = _materialise(model, dtype, on_progress)
        served = MlxLmModel(model)
        served.settle()
    except Exception as error:  # another package, and files of strangers: whatever it says is what is wrong
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise refuse(
            ErrorCode.BAD_CHECKPOINT,
            f"{path}: mlx-lm cannot load it ({problem}); convert the model anew with this mlx-lm, or choose another",
        ) from None
    return served, size


def both_dialects(raw: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What a config of transformers 5 lacks for classes that read that of transformers 4, to be added to it.

    mlx-lm takes its defaults for what is missing, and some models would come out wrong without a word.
    """
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    more: dict[str, Any] = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if "rope_theta" in rope.get("sliding_attention", {}):
        more["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    scaling = {key: value for key, value in full.items() if key not in more}
    if scaling.get("rope_type", "default") != "default":
        more["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
    if "num_experts" in config:
        more["num_experts"] = config["num_experts"]
    inner = raw.get("text_config")
    if isinstance(inner, dict):
        return {"text_config": {**more, **_said(inner)}}
    return {key: value for key, value in more.items() if key not in _said(raw)}


def _said(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _materialise(model: Any, dtype: mx.Dtype, on_progress: Progress | None) -> int:
    """Cast what the model lets be cast, read everything in groups; gives its bytes."""
    may_cast = getattr(model, "cast_predicate", lambda name: True)
    cast: list[tuple[str, mx.array]] = []
    leaves: Any = tree_flatten(model.parameters())  # typed as if it could be a dict
    for name, value in leaves:
        wanted = mx.issubdtype(value.dtype, mx.floating) and (dtype == mx.float32 or may_cast(name))
        cast.append((name, value.astype(dtype) if wanted else value))
    model.update(tree_unflatten(cast))
    return materialise([value for _, value in cast], on_progress)
