"""A model run over rows of a text, alone or beside a reference: how likely each next token was, how far apart they are.

Rows are cut as mlx-lm's `perplexity` cuts them: texts end to end, in rows that do not overlap, each run by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from shared.dataset import read, read_rows
from shared.errors import ErrorCode, refuse
from worker.adapters.mount import Adapters
from worker.datasets.examples import Writer
from worker.layers.batch import Batch
from worker.measure.compare import Comparison, Measured
from worker.measure.texts import text_of
from worker.models import DecoderModel, LoadedModel, load_model
from worker.models.decoder import Decoder

PASS_TOKENS = 2048
"""Tokens of one pass."""
OWN_TEXT = Path(__file__).parents[1] / "measure" / "held_out.txt"

Rows = Sequence[Sequence[int]]
Tell = Callable[[str, int, int], None]
"""(stage, done, total); it may raise to stop."""


def rows_of(model: Path, data: str, count: int, length: int, seed: int) -> list[list[int]]:
    """At most `count` rows of `length` token ids; where the text has fewer, one row of what there is.

    `data` "": the text that comes along. A folder, or a name that ends in .jsonl, is a data set, whose rows are taken
    in an order of `seed`. Raises `Refused` (invalid_request).
    """
    writer = Writer(model)
    tokens = _tokens(writer, data, count * length, seed)
    rows = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)][:count]
    if not rows and len(tokens) > 1:
        rows = [tokens]
    if not rows:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{data or OWN_TEXT}: there is no text in it", param="data")
    return rows


def _tokens(writer: Writer, data: str, enough: int, seed: int) -> list[int]:
    place = Path(data) if data else OWN_TEXT
    if not place.is_dir() and place.suffix != ".jsonl":
        return writer.tokenizer.encode_text(text_of(place, "data"))
    if place.is_dir():
        found = read(place, split=False)
        rows = found.valid or found.train
    else:
        rows = read_rows(place)
    tokens: list[int] = []
    for number in np.random.RandomState(seed % (1 << 32)).permutation(len(rows)):
        if len(tokens) >= enough:
            break
        tokens += writer.examples(rows[int(number)], "full")[0].tokens
    return tokens


def score(model: Path, rows: Rows, tell: Tell, *, adapter: str = "", reference: str = "") -> Measured:
    """Run the rows through the reference, if there is one, then through the model with its adapter.

    Of the reference only its head and the last hidden states stay in memory meanwhile. Raises `Refused`.
    """
    kept: list[mx.array] = []
    other: DecoderModel | None = None
    if reference:
        loaded = _loaded(Path(reference), "load reference", tell)
        kept = list(_hidden(loaded, rows, "reference", tell))
        other = loaded.model
        if isinstance(other, Decoder):
            other.layers = []  # the head is all that is needed of it now
        del loaded
        mx.clear_cache()
    loaded = _loaded(model, "load", tell)
    if other is not None:
        _check_same_words(loaded, other, kept[0])
    held = _with_adapter(loaded, adapter)
    comparison = Comparison([model.head for model in (other, loaded.model) if model is not None])
    before = iter(kept)
    for hidden, group in zip(_hidden(loaded, rows, "score", tell, held), _groups(rows), strict=True):
        comparison.add(group, [hidden] if other is None else [next(before), hidden])
    return comparison.result()


def _loaded(path: Path, stage: str, tell: Tell) -> LoadedModel:
    return load_model(path, on_progress=lambda done, total: tell(stage, done, total))


def _with_adapter(loaded: LoadedModel, adapter: str) -> Adapters | None:
    if not adapter:
        return None
    held = Adapters(loaded.linears, loaded.parts, loaded.dtype, str(loaded.checkpoint.path))
    held.mount("it", adapter)
    return held


def _check_same_words(loaded: LoadedModel, other: DecoderModel, hidden: mx.array) -> None:
    """Two models can be compared only over one vocabulary. `hidden`: some of the other's."""
    theirs, own = other.head(hidden[:1]).shape[-1], int(loaded.checkpoint.config["vocab_size"])
    if theirs != own:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"the reference has {theirs} words and the model {own}: only models of one vocabulary can be compared",
            param="reference",
        )


def _groups(rows: Rows) -> Iterator[Rows]:
    """Rows of one pass, in order."""
    most = max(1, PASS_TOKENS // len(rows[0]))
    for begin in range(0, len(rows), most):
        yield rows[begin : begin + most]


def _hidden(
    loaded: LoadedModel, rows: Rows, stage: str, tell: Tell, adapters: Adapters | None = None
) -> Iterator[mx.array]:
    """Last hidden states [T, D] of each group of rows."""
    done = 0
    for group in _groups(rows):
        tell(stage, done, len(rows))
        tokens = mx.array([token for row in group for token in row], mx.int32)
        batch = Batch(tokens, [(loaded.model.make_caches(len(row)), len(row)) for row in group])
        if adapters is not None:
            adapters.selection.choose([(("it",), len(row)) for row in group])
        hidden = loaded.model(batch)
        mx.eval(hidden)
        yield hidden
        done += len(group)
    tell(stage, done, len(rows))
