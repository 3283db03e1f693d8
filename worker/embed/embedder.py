"""`POST /embed` and `POST /rank`: texts to ids, through the model, to vectors or scores.

An encoder reads groups of texts, each a step of the engine. A decoder reads each text as a row beside those that
answer, in pieces as prompts are prefilled, half of the rows at most.
"""

import asyncio
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shared.encoders import ABILITIES, ENCODERS, Kind
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.wire import EmbedRequest, EmbedResult, Event, RankRequest, RankResult, TextPrompt, TokenPrompt
from worker.embed.groups import groups
from worker.embed.texts import Ids, check_length, encode, encode_pairs
from worker.engine.engine import Engine, Output
from worker.engine.sequence import SamplingPlan
from worker.engine.sequence import Sequence as Row
from worker.pipeline import Pipeline
from worker.resolve import check_ids

T = TypeVar("T")

_ROLES = {"query": ("query", "search_query"), "document": ("document", "passage", "search_document")}


class Reading:
    """A text on its way through a decoder: a stream that has no events."""

    reader = ""

    def __init__(self, serial: int = 0) -> None:
        self.serial = serial
        self.vector: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def feed(self, output: Output) -> bool:
        """Never to be cancelled for what it says."""
        if not self.vector.done():
            if output.failure is not None:
                self.vector.set_exception(Refused(output.failure))
            elif output.vector is not None:
                self.vector.set_result(output.vector)
        return False

    def take(self) -> list[Event]:
        return []

    def fail(self, failure: Failure) -> None:
        if not self.vector.done():
            self.vector.set_exception(Refused(failure))


class Embedder:
    """Both routes. Everything here runs on the event loop but for encoding, which has a thread."""

    def __init__(self, pipeline: Pipeline, engine: Engine) -> None:
        self._pipeline, self._engine = pipeline, engine
        self._context = pipeline.context
        self._rows = asyncio.Semaphore(max(1, self._context.loaded.max_rows // 2))

    @property
    def kind(self) -> Kind:
        return self._context.facts.kind

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Raises `Refused`; nothing is left running then."""
        if self.kind == "reranker":
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self._context.model_id} {ABILITIES[self.kind]}, and has no vectors",
                param="model",
            )
        if isinstance(fault := self._context.loaded.pooling, Failure):
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self._context.model_id} has no vectors here: {fault.message}",
                param="model",
            )
        self._check_new()
        if not request.inputs:
            raise refuse(ErrorCode.INVALID_REQUEST, "there are no inputs", param="input")
        width = self._context.facts.dimensions
        if 0 < width < request.dimensions:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"dimensions is {request.dimensions}, and the vectors of this model have {width}",
                param="dimensions",
            )
        prompt = self._prompt(request)
        texts = await asyncio.to_thread(self._encode, request, prompt)
        found = await (self._grouped if self._is_encoder else self._by_rows)(texts, request.dimensions)
        tokens = sum(len(text.ids) for text in texts)
        return EmbedResult(b"".join(found), len(found[0]) // 4, tokens)

    async def rank(self, request: RankRequest) -> RankResult:
        """Raises `Refused`. A model that is no reranker scores by the cosine of its vectors."""
        if self.kind == "reranker":
            return await self._rank_pairs(request)
        query = await self.embed(EmbedRequest(inputs=[TextPrompt(request.query)], role="query", truncate=-1))
        documents: list[TextPrompt | TokenPrompt] = [TextPrompt(text) for text in request.documents]
        others = await self.embed(EmbedRequest(inputs=documents, role="document", truncate=-1))
        rows = [_unit(row) for row in _rows(others)]
        [asked] = map(_unit, _rows(query))
        scores = [sum(a * b for a, b in zip(asked, row, strict=True)) for row in rows]
        return RankResult(scores, query.tokens + others.tokens)

    async def _rank_pairs(self, request: RankRequest) -> RankResult:
        from worker.embed.forward import scores

        self._check_new()
        core, most = self._context.tokenizer.core, self._context.context
        texts = await asyncio.to_thread(encode_pairs, core, request.query, request.documents, most=most)
        model = self._context.loaded.model
        found = await self._in_groups(texts, lambda group: scores(model, group))
        return RankResult(found, sum(len(text.ids) for text in texts))

    # ------------------------------------------------------------ before the model

    def _check_new(self) -> None:
        if self._pipeline.is_draining:
            raise refuse(ErrorCode.SHUTTING_DOWN, "this worker is draining; try again", retry_after_s=1)

    def _prompt(self, request: EmbedRequest) -> str:
        """What goes before each text."""
        sentence = self._context.loaded.pooling.sentence
        if request.prompt:
            return request.prompt
        if request.prompt_name:
            if request.prompt_name not in sentence.prompts:
                known = ", ".join(sentence.prompts) or "none"
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"this model has no prompt {request.prompt_name!r}; its prompts: {known}",
                    param="prompt_name",
                )
            return str(sentence.prompts[request.prompt_name])
        names = (*_ROLES.get(request.role, ()), sentence.default_prompt)
        return next((sentence.prompts[name] for name in names if name in sentence.prompts), "")

    def _encode(self, request: EmbedRequest, prompt: str) -> list[Ids]:
        """In a thread. Raises `Refused`."""
        most, cut_at = self._most_tokens(), 0
        if request.truncate:
            cut_at = most if request.truncate < 0 else min(most, request.truncate)
        found: dict[int, Ids] = {}
        texts: dict[int, str] = {}
        for place, given in enumerate(request.inputs):
            if isinstance(given, TextPrompt):
                texts[place] = prompt + given.text
                continue
            ids = given.ids[: cut_at or None]
            check_ids(ids, self._context.facts.vocab_size, "input")
            check_length(len(ids), most, place)
            if not ids:
                raise refuse(ErrorCode.INVALID_REQUEST, f"input[{place}] has no tokens", param="input")
            found[place] = Ids(ids, [0] * len(ids))
        core = self._context.tokenizer.core
        encoded = encode(core, list(texts.values()), most=most, cut_at=cut_at, places=list(texts))
        found.update(zip(texts, encoded, strict=True))
        return [found[place] for place in range(len(request.inputs))]

    def _most_tokens(self) -> int:
        """Of one text: the model's context, and for a decoder what the KV budget holds."""
        return min(self._context.context, self._pipeline.kv.most_tokens(self._context.context + 1) - 1)

    # ------------------------------------------------------------ through the model

    @property
    def _is_encoder(self) -> bool:
        return self._context.facts.family in ENCODERS

    async def _grouped(self, texts: Sequence[Ids], dimensions: int) -> list[bytes]:
        from worker.embed.forward import vectors

        loaded = self._context.loaded
        return await self._in_groups(
            texts, lambda group: vectors(loaded.model, loaded.pooling, group, dimensions)
        )

    async def _in_groups(self, texts: Sequence[Ids], read: Callable[[list[Ids]], list[T]]) -> list[T]:
        """One group after the other, so that requests take turns and one that has left costs no more."""
        found: dict[int, T] = {}
        with self._pipeline.holding(uuid.uuid4().hex, Reading()):
            for places in groups([len(text.ids) for text in texts], self._context.loaded.prefill_chunk):
                group = [texts[place] for place in places]
                results = await asyncio.wrap_future(self._engine.step(lambda group=group: read(group)))  # type: ignore[misc]
                found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(texts))]

    async def _by_rows(self, texts: Sequence[Ids], dimensions: int) -> list[bytes]:
        """Each text a row; where one is refused all end."""
        try:
            with self._pipeline.holding(uuid.uuid4().hex, Reading()):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._row(text.ids, dimensions)) for text in texts]
        except* Refused as refused:
            raise _first(refused) from None
        return [task.result() for task in tasks]

    async def _row(self, ids: list[int], dimensions: int) -> bytes:
        collector = self._context.loaded.pooling.collector(dimensions)
        row = Row(uuid.uuid4().hex, ids, 1, SamplingPlan(), 0, frozenset(), pooler=collector)
        reading = Reading(row.serial)
        async with self._rows:
            with self._pipeline.holding(row.id, reading):
                self._engine.submit(row)
                try:
                    return await reading.vector
                finally:
                    if not reading.vector.done() or reading.vector.cancelled():
                        self._engine.cancel(row.id)


def _first(group: BaseExceptionGroup[Refused]) -> Refused:
    """One of the exceptions of a group, however deep."""
    one: Any = group
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    assert isinstance(one, Refused)
    return one


def _rows(result: EmbedResult) -> list[list[float]]:
    values, size = array("f", result.vectors).tolist(), result.dimensions
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _unit(row: list[float]) -> list[float]:
    length = sum(value * value for value in row) ** 0.5
    return [value / length for value in row] if length else row
