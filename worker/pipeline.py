"""One request top to bottom: check, render, encode, constrain, submit; its events. Read this first.

Everything here runs on the event loop, except that long prompts are encoded, templates rendered and grammars
compiled in threads. The engine reports the outputs of a whole step at once; each stream (`worker.stream`) turns its
own into events.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from shared.encoders import ABILITIES
from shared.errors import ErrorCode, Failure, Refused, refuse
from shared.units import format_bytes
from shared.wire import (
    CacheLookup,
    CacheReport,
    ChatPrompt,
    DetokenizeResult,
    Event,
    GenerateRequest,
    Mounts,
    Prompt,
    StepFrame,
    TextPrompt,
)
from worker.context import ModelContext
from worker.engine.engine import Engine, Output
from worker.engine.grammar import COMPILE_S, Constraint
from worker.engine.sequence import Sequence
from worker.resolve import check_ids, check_logprobs, check_sampling, resolve_sampling
from worker.shape import Shape, shape_of
from worker.stream import Stream
from worker.text.conversation import render_chat

log = logging.getLogger("worker")

OnStep = Callable[[StepFrame], None]

RENDER_S = 30.0
"""A template that takes longer is broken; its thread cannot be ended, but its request can."""
THREAD_ABOVE = 20_000
"""Characters of prompt above which encoding leaves the event loop (about 10 ms)."""


class Listener(Protocol):
    """Who takes the outputs of one row: a stream, or what reads a text only."""

    reader: str
    serial: int  # of the row; its id may be that of an earlier one, whose last outputs are still to come

    def feed(self, output: Output) -> bool:
        """Take the output in; True: the row is to be cancelled."""

    def take(self) -> list[Event]:
        """The events that are ready."""

    def fail(self, failure: Failure) -> None:
        """It is over: nothing that comes for it can be read any more."""


class Pipeline:
    """All streams of a worker. `dispatch` is what the engine's outputs go to, on the event loop."""

    def __init__(self, context: ModelContext, engine: Engine) -> None:
        self.context = context
        self.kv = context.kv
        self._engine = engine
        self._streams: dict[str, Listener] = {}
        self.readers: dict[str, OnStep] = {}  # by name: who takes the events of the streams that name it
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def dispatch(self, outputs: list[Output]) -> None:
        """The outputs of one step; what they give to the streams of a reader leaves as one frame."""
        frames: dict[str, list[tuple[str, list[Event]]]] = {}
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None or stream.serial != output.serial:
                continue
            try:
                is_over = stream.feed(output)
            except Exception as error:  # the others of this step must not miss what it gave them
                log.exception("worker.answer_failed")
                stream.fail(Failure(ErrorCode.INTERNAL, f"a bug in the server: {type(error).__name__}"))
                is_over = True
            if is_over:
                self._engine.cancel(output.id)
            if stream.reader and (events := stream.take()):
                frames.setdefault(stream.reader, []).append((output.id, events))
        for reader, parts in frames.items():
            self._tell(reader, parts)

    def _tell(self, reader: str, parts: list[tuple[str, list[Event]]]) -> None:
        on_step = self.readers.get(reader)
        if on_step is not None:  # else it has left, and its requests are about to be cancelled
            on_step(StepFrame(parts))

    async def prepare(self, request: GenerateRequest) -> Stream:
        """Everything that can refuse a request. Raises `Refused`; nothing has been submitted then."""
        self._check_new(request)
        if self.is_draining:
            raise refuse(ErrorCode.SHUTTING_DOWN, "this worker is draining; try again", retry_after_s=1)
        param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        rendered, ids = await self.render(request.prompt)
        if not ids:
            raise refuse(ErrorCode.INVALID_REQUEST, "the prompt is empty: it has no tokens", param=param)
        limit = self._limit(request.max_context, len(ids), param)
        shape = shape_of(self.context, request, rendered)
        constraint = await self._constrain(request, shape)
        room = limit - len(ids)
        sequence = Sequence(
            id=request.request_id,
            prompt=[*ids, *request.resume],
            max_tokens=min(request.max_tokens or room, room),
            sampling=resolve_sampling(
                request.sampling,
                self.context.defaults,
                xtc_keep=self.context.xtc_keep,
                logprobs=request.logprobs,
            ),
            seed=request.seed,
            eos=self.context.eos,
            num_resumed=len(request.resume),
            constraint=constraint,
            adapters=tuple(request.adapters),
        )
        self._check_free(request.request_id)  # again: others have had their turn since
        return Stream(self.context, request, sequence, rendered, shape, limit)

    async def run(self, stream: Stream) -> AsyncGenerator[list[Event]]:
        """Submit and yield events until the last one; leaving early cancels the sequence."""
        if stream.is_done:  # a resumed request that had ended already
            yield await stream.events()
            return
        with self._running(stream):
            while not stream.is_done:
                yield await stream.events()

    async def run_by_steps(self, stream: Stream) -> None:
        """The same with the events going to the stream's reader; returns after the last one."""
        if stream.is_done:
            self._tell(stream.reader, [(stream.sequence.id, stream.take())])
        else:
            with self._running(stream):
                await stream.ended.wait()

    def _check_new(self, request: GenerateRequest) -> None:
        """Refuse an id that is in flight, a `reader` that is not there, and numbers that mean nothing."""
        facts = self.context.facts
        if facts.kind != "chat":
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self.context.model_id} {ABILITIES[facts.kind]}, and does not write",
                param="model",
            )
        self._check_free(request.request_id)
        if request.reader and request.reader not in self.readers:
            raise refuse(ErrorCode.INVALID_REQUEST, f"nobody reads /steps/{request.reader}", param="reader")
        vocab_size = self.context.facts.vocab_size
        check_sampling(request.sampling, vocab_size)
        check_logprobs(request.logprobs)
        check_ids(request.resume, vocab_size, "resume")
        if request.adapters:
            self._adapters().check(tuple(request.adapters))

    def _check_free(self, request_id: str) -> None:
        if request_id in self._streams:
            raise refuse(ErrorCode.INVALID_REQUEST, f"request id {request_id!r} is in flight already")

    async def _constrain(self, request: GenerateRequest, shape: Shape) -> Constraint | None:
        """What the tokens of an answer have to be: thoughts of some length, then text of some form, or calls."""
        calls = shape.enforced(request.grammar)
        budget = shape.budget(self.context, request.thinking_budget)
        if request.grammar is None and calls is None and budget is None:
            return None
        thinking = shape.thoughts()
        grammars = self.context.grammars
        work = asyncio.get_running_loop().run_in_executor(
            grammars.pool, grammars.compile, request.grammar, thinking, request.resume, calls, budget
        )
        try:
            async with asyncio.timeout(COMPILE_S):
                return await work
        except TimeoutError:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"the grammar was not compiled within {COMPILE_S:g} s; make it smaller",
                param="grammar",
            ) from None

    @contextmanager
    def _running(self, stream: Stream) -> Iterator[None]:
        sequence_id = stream.sequence.id
        with self.holding(sequence_id, stream):
            self._engine.submit(stream.sequence)
            try:
                yield
            finally:
                if not stream.is_done:
                    self._engine.cancel(sequence_id)

    @contextmanager
    def holding(self, name: str, listener: Listener) -> Iterator[None]:
        """Outputs of this id and its serial go to `listener`, and a drain waits for it. Raises `Refused`."""
        self._check_free(name)
        self._streams[name] = listener
        self._idle.clear()
        try:
            yield
        finally:
            del self._streams[name]
            if not self._streams:
                self._idle.set()

    def resize(self, kv_bytes: int, prefix_cache_bytes: int) -> None:
        """Other caps from now on; requests that are in flight come to the end that they were promised."""
        self.kv = replace(self.kv, limit=kv_bytes)
        self._engine.resize(kv_bytes, prefix_cache_bytes)

    async def mount(self, key: str, path: str) -> Mounts:
        """Hold an adapter. Raises `Refused`; the model is as it was then."""
        adapters = self._adapters()
        await asyncio.wrap_future(self._engine.step(lambda: adapters.mount(key, path)))
        return await self.mounts()

    async def unmount(self, key: str) -> Mounts:
        """Let an adapter go; rows that run with it come to their end first. Raises `Refused` (not_found)."""
        adapters = self._adapters()
        if not await asyncio.wrap_future(self._engine.call(lambda: adapters.unmount(key))):
            raise refuse(ErrorCode.NOT_FOUND, f"adapter {key} is not mounted", param="adapter")
        return await self.mounts()

    async def mounts(self) -> Mounts:
        """What is mounted now."""
        held = self.context.loaded.adapters
        return Mounts([] if held is None else await asyncio.wrap_future(self._engine.call(held.mounted)))

    def _adapters(self) -> Any:
        held = self.context.loaded.adapters
        if held is None:
            raise refuse(ErrorCode.UNSUPPORTED, f"{self.context.model_id} takes no adapters", param="adapter")
        return held

    async def cache_report(self) -> CacheReport:
        """What is kept of prompts, and how the last ones were looked up."""
        lookups, entries, limit = await asyncio.wrap_future(self._engine.lookups())
        decode = self.context.tokenizer.core.decode

        def text(token: int) -> str:
            return decode([token], skip_special_tokens=False) if token >= 0 else ""

        stats = self._engine.stats()
        return CacheReport(
            prefix_bytes=stats.prefix_bytes,
            prefix_limit=limit,
            entries=entries,
            disk_bytes=stats.disk_bytes,
            restored_bytes=stats.restored_bytes,
            lookups=[
                CacheLookup(
                    prompt_tokens=one.prompt_tokens,
                    reused=one.reused,
                    from_memory=one.reused - one.from_disk,
                    from_disk=one.from_disk,
                    common=one.common,
                    reason=one.reason,
                    kept=text(one.differs[0]),
                    asked=text(one.differs[1]),
                )
                for one in reversed(lookups)
            ],
        )

    async def drained(self) -> None:
        """Take no more requests; returns when none is in flight."""
        self.is_draining = True
        await self._idle.wait()

    async def render(
        self, prompt: Prompt, *, add_special: bool = True, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """-> (the text as the model sees it, its ids). Raises `Refused`.

        `add_special`: with what the tokenizer adds to plain text. `add_generation_prompt`: a conversation ends with
        the beginning of the assistant's turn.
        """
        tokenizer = self.context.tokenizer
        if isinstance(prompt, ChatPrompt):
            text = await self._render_chat(prompt, add_generation_prompt)
            return text, await self._encode(tokenizer.encode_rendered, text, "messages")
        if isinstance(prompt, TextPrompt):
            encode = tokenizer.encode_text if add_special else tokenizer.encode_rendered
            return prompt.text, await self._encode(encode, prompt.text, "prompt")
        check_ids(prompt.ids, self.context.facts.vocab_size, "prompt")
        if len(prompt.ids) >= self.context.context:
            raise self._too_long(f"{len(prompt.ids)} tokens", len(prompt.ids), self.context.context, "prompt")
        return tokenizer.core.decode(prompt.ids, skip_special_tokens=False), prompt.ids

    async def detokenize(self, ids: list[int]) -> DetokenizeResult:
        """The text of these ids, and what each stands for. Raises `Refused`."""
        check_ids(ids, self.context.facts.vocab_size, "tokens")

        def spell() -> DetokenizeResult:
            text = self.context.tokenizer.core.decode(ids, skip_special_tokens=False)
            return DetokenizeResult(text, [self.context.detokenizers.spelled(token) for token in ids])

        return spell() if len(ids) <= THREAD_ABOVE else await asyncio.to_thread(spell)

    async def _render_chat(self, prompt: ChatPrompt, add_generation_prompt: bool) -> str:
        """In a thread: a template is somebody else's program, and may take its time."""

        def render() -> str:
            return render_chat(self.context.template, prompt, add_generation_prompt=add_generation_prompt)

        try:
            async with asyncio.timeout(RENDER_S):
                return await asyncio.to_thread(render)
        except TimeoutError:
            raise refuse(
                ErrorCode.TEMPLATE_FAILED,
                f"the chat template did not finish within {RENDER_S:g} s",
                param="messages",
            ) from None

    async def _encode(self, encode: Callable[[str], list[int]], text: str, param: str) -> list[int]:
        """Ids of `text`; a text that cannot fit, whatever its tokens are, is refused unread."""
        if len(text) <= THREAD_ABOVE:
            return encode(text)
        at_least = len(text) // self.context.tokenizer.longest_token_bytes
        if at_least >= self.context.context:
            what = f"{len(text)} characters, {at_least} tokens or more"
            raise self._too_long(what, at_least, self.context.context, param)
        return await asyncio.to_thread(encode, text)

    def _limit(self, asked: int, num_tokens: int, param: str) -> int:
        """Tokens that prompt and answer may have together: the model's context, what the request asks for, what the
        KV budget holds. Raises `Refused` when that leaves no room for an answer.
        """
        context = min(asked or self.context.context, self.context.context)
        if num_tokens >= context:
            raise self._too_long(f"{num_tokens} tokens", num_tokens, context, param)
        kv = self.kv
        limit = kv.most_tokens(context)
        if num_tokens >= limit:
            raise _too_many(
                ErrorCode.CANNOT_FIT,
                f"the prompt has {num_tokens} tokens and the first of its answer needs "
                f"{format_bytes(kv.row_bytes(num_tokens + 1))} of KV cache; this model has "
                f"{format_bytes(kv.limit)} for it (kv_bytes), enough for {limit} tokens; shorten the prompt by at "
                f"least {num_tokens - limit + 1} tokens, or raise kv_bytes",
                param,
                num_tokens,
                limit,
            )
        return limit

    def _too_long(self, what: str, num_tokens: int, context: int, param: str) -> Refused:
        whose = "the model's" if context == self.context.context else "its"
        return _too_many(
            ErrorCode.CONTEXT_EXCEEDED,
            f"the prompt has {what} and {whose} context is {context} tokens; "
            f"shorten the prompt by at least {num_tokens - context + 1} tokens",
            param,
            num_tokens,
            context,
        )


def _too_many(code: ErrorCode, message: str, param: str, num_tokens: int, limit: int) -> Refused:
    """`limit` tokens are prompt and answer together, so the prompt may have one less."""
    return Refused(Failure(code, message, param, tokens=num_tokens, most_tokens=limit - 1))
