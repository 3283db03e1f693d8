"""One request top to bottom: render, encode, submit, detokenise, stop, split, events. Read this first.

Everything here runs on the event loop, except that long prompts are encoded in a thread. The engine reports
the outputs of a whole step at once; each stream turns its own into text immediately and wakes its reader, so
what piles up while a reader is slow leaves as one event.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from shared.errors import ErrorCode, Refused, refuse
from shared.units import format_bytes
from shared.wire import (
    ChatPrompt,
    Event,
    Finish,
    FinishReason,
    GenerateRequest,
    Prefill,
    Prompt,
    Reasoning,
    Sampling,
    Started,
    StepFrame,
    Text,
    TextPrompt,
    Timings,
    Usage,
)
from worker.context import ModelContext
from worker.engine.engine import Engine, Output
from worker.engine.sequence import SamplingPlan, Sequence
from worker.text.messages import normalise
from worker.text.reasoning import Kind, ReasoningSplitter, starts_open
from worker.text.stops import StopMatcher

OnStep = Callable[[StepFrame], None]

DEFAULT_TEMPERATURE = 0.7
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6
RENDER_S = 30.0
"""A template that takes longer is broken; its thread cannot be ended, but its request can."""
THREAD_ABOVE = 20_000
"""Characters of prompt above which encoding leaves the event loop (about 10 ms)."""


class Stream:
    """One answer under way: outputs of the engine in, events out."""

    def __init__(
        self,
        context: ModelContext,
        request: GenerateRequest,
        sequence: Sequence,
        rendered: str,
        limit: int,  # of prompt and answer, in tokens
    ) -> None:
        self.sequence = sequence
        self.context = context
        self._limit = limit
        self._detokenizer = context.detokenizers.new()
        self._stops = StopMatcher(request.stop)
        form = context.reasoning if request.split_reasoning else None
        self._splitter = (
            ReasoningSplitter(form, starts_open(rendered, form))
            if form and isinstance(request.prompt, ChatPrompt)
            else None
        )
        self._pieces: list[tuple[Kind, str]] = []
        self._ids: list[int] = []
        self._events: list[Event] = []
        self.reader = request.reader
        self.ended = asyncio.Event()
        self._wake = asyncio.Event()
        self._num_reasoning = 0
        self._num_completion = 0
        self._num_cached = 0
        self._num_prefilled = 0
        self._submitted_at = time.monotonic()
        self._admitted_at = self._submitted_at
        self._first_at: float | None = None
        self.is_done = False
        self._replay(request.resume)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt proper, without those of a resumed answer."""
        return len(self.sequence.prompt) - self.sequence.num_resumed

    def feed(self, output: Output) -> bool:
        """Take one output of the engine. True: the engine should stop this sequence (a stop string fired)."""
        if self.is_done:
            return False
        if output.admitted:
            self._admitted_at = time.monotonic()
            self._num_cached = min(output.reused, self.num_prompt)
            left = max(0, self._limit - len(self.sequence.prompt))
            self._events.append(Started(self.num_prompt, self._num_cached, left))
        done = min(output.prefilled or 0, self.num_prompt)
        if (
            done > self._num_prefilled
        ):  # a row that was preempted runs its prompt again, which is nothing to tell
            self._num_prefilled = done
            self._events.append(Prefill(done, self.num_prompt))
        if output.token is not None:
            self._token(output.token, is_eos=output.finish == "stop")
        if self._stops.matched is not None:
            self._finish("stop")
        elif output.finish:
            self._finish(output.finish)
        if self._pieces or self._events:
            self._wake.set()
        return self._stops.matched is not None and output.finish is None

    async def events(self) -> list[Event]:
        """All events so far that have not been taken; waits for at least one."""
        await self._wake.wait()
        return self.take()

    def take(self) -> list[Event]:
        """All events so far that have not been taken, perhaps none."""
        self._wake.clear()
        self._flush_pieces()
        taken, self._events = self._events, []
        return taken

    def _token(self, token: int, *, is_eos: bool) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._num_completion += 1
        if self._splitter is not None:
            self._num_reasoning += self._splitter.in_reasoning
        if not is_eos:
            self._ids.append(token)
            self._split(self._stops.feed(self._detokenizer.feed(token)))

    def _split(self, text: str) -> None:
        """Text that has passed the stop strings."""
        if text:
            self._pieces += self._splitter.feed(text) if self._splitter else [("text", text)]

    def _replay(self, ids: list[int]) -> None:
        """Rebuild the state of the parsers from the ids of an earlier worker; their text has left already."""
        for token in ids:
            self._token(token, is_eos=False)
        self._pieces.clear()
        self._ids.clear()
        self._first_at = None
        if self._stops.matched is not None:
            self._finish("stop")
        elif len(ids) >= self.sequence.max_tokens:
            self._finish("length")
        if self.is_done:
            self._wake.set()

    def _finish(self, reason: FinishReason) -> None:
        """What was held back comes out now; it may still complete a stop string."""
        self._split(self._stops.feed(self._detokenizer.flush()) + self._stops.flush())
        if self._stops.matched is not None:
            reason = "stop"
        if self._splitter is not None:
            self._pieces += self._splitter.flush()
        self._flush_pieces()
        now = time.monotonic()
        first = self._first_at or now
        self._events.append(
            Finish(
                reason,
                Usage(self.num_prompt, self._num_completion, self._num_cached, self._num_reasoning),
                Timings(
                    round(self._admitted_at - self._submitted_at, 6),
                    round(first - self._admitted_at, 6),
                    round(now - first, 6),
                ),
                self._stops.matched,
            )
        )
        self.is_done = True
        self.ended.set()

    def _flush_pieces(self) -> None:
        """Pieces to events: neighbours of one kind are joined, the ids go with the last."""
        merged: list[tuple[Kind, str]] = []
        for kind, text in self._pieces:
            if merged and merged[-1][0] == kind:
                merged[-1] = (kind, merged[-1][1] + text)
            elif text:
                merged.append((kind, text))
        self._pieces.clear()
        for place, (kind, text) in enumerate(merged):
            ids: list[int] = []
            if place == len(merged) - 1:
                ids, self._ids = self._ids, []
            self._events.append(Text(text, ids) if kind == "text" else Reasoning(text, ids))


class Pipeline:
    """All streams of a worker. `dispatch` is what the engine's outputs go to, on the event loop."""

    def __init__(self, context: ModelContext, engine: Engine) -> None:
        self.context = context
        self.kv = context.kv
        self._engine = engine
        self._streams: dict[str, Stream] = {}
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
            if stream is None:
                continue
            if stream.feed(output):
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
        room = limit - len(ids)
        sequence = Sequence(
            id=request.request_id,
            prompt=[*ids, *request.resume],
            max_tokens=min(request.max_tokens or room, room),
            sampling=resolve_sampling(request.sampling, self.context.defaults),
            seed=request.seed,
            eos=self.context.eos,
            num_resumed=len(request.resume),
        )
        return Stream(self.context, request, sequence, rendered, limit)

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
        """Refuse an id that is in flight, and a `reader` that is not there."""
        if request.request_id in self._streams:
            raise refuse(ErrorCode.INVALID_REQUEST, f"request id {request.request_id!r} is in flight already")
        if request.reader and request.reader not in self.readers:
            raise refuse(ErrorCode.INVALID_REQUEST, f"nobody reads /steps/{request.reader}", param="reader")

    @contextmanager
    def _running(self, stream: Stream) -> Iterator[None]:
        sequence_id = stream.sequence.id
        self._streams[sequence_id] = stream
        self._idle.clear()
        self._engine.submit(stream.sequence)
        try:
            yield
        finally:
            del self._streams[sequence_id]
            if not self._streams:
                self._idle.set()
            if not stream.is_done:
                self._engine.cancel(sequence_id)

    def resize(self, kv_bytes: int, prefix_cache_bytes: int) -> None:
        """Other caps from now on; requests that are in flight come to the end that they were promised."""
        self.kv = replace(self.kv, limit=kv_bytes)
        self._engine.resize(kv_bytes, prefix_cache_bytes)

    async def drained(self) -> None:
        """Take no more requests; returns when none is in flight."""
        self.is_draining = True
        await self._idle.wait()

    async def render(self, prompt: Prompt) -> tuple[str, list[int]]:
        """-> (the text as the model sees it, its ids). Raises `Refused`."""
        if isinstance(prompt, ChatPrompt):
            text = await self._render_chat(prompt)
            return text, await self._encode(self.context.tokenizer.encode_rendered, text, "messages")
        if isinstance(prompt, TextPrompt):
            return prompt.text, await self._encode(self.context.tokenizer.encode_text, prompt.text, "prompt")
        bad = next((i for i in prompt.ids if not 0 <= i < self.context.facts.vocab_size), None)
        if bad is not None:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"token id {bad} is outside the vocabulary of {self.context.facts.vocab_size}",
                param="prompt",
            )
        if len(prompt.ids) >= self.context.context:
            raise self._too_long(f"{len(prompt.ids)} tokens", len(prompt.ids), self.context.context, "prompt")
        return self.context.tokenizer.core.decode(prompt.ids, skip_special_tokens=False), prompt.ids

    async def _render_chat(self, prompt: ChatPrompt) -> str:
        """In a thread: a template is somebody else's program, and may take its time."""

        def render() -> str:
            return self.context.template.render(normalise(prompt.messages), prompt.template_kwargs)

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
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"the prompt has {num_tokens} tokens and the first of its answer needs "
                f"{format_bytes(kv.row_bytes(num_tokens + 1))} of KV cache; this model has "
                f"{format_bytes(kv.limit)} for it (kv_bytes), enough for {limit} tokens; shorten the prompt by at "
                f"least {num_tokens - limit + 1} tokens, or raise kv_bytes",
                param=param,
            )
        return limit

    def _too_long(self, what: str, num_tokens: int, context: int, param: str) -> Refused:
        whose = "the model's" if context == self.context.context else "its"
        return refuse(
            ErrorCode.CONTEXT_EXCEEDED,
            f"the prompt has {what} and {whose} context is {context} tokens; "
            f"shorten the prompt by at least {num_tokens - context + 1} tokens",
            param=param,
        )


def resolve_sampling(asked: Sampling, defaults: Sampling) -> SamplingPlan:
    """Field by field: the request, else the model's `generation_config.json`, else temperature 0.7 and no cuts."""

    def pick(name: str, built_in: float) -> float:
        for source in (asked, defaults):
            value = getattr(source, name)
            if value is not None:
                return float(value)
        return built_in

    temperature = pick("temperature", DEFAULT_TEMPERATURE)
    return SamplingPlan(
        # Below this a draw is the most likely token anyway, and 1 / temperature leaves float32.
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(pick("top_p", 1.0), MIN_TOP_P),
        top_k=int(pick("top_k", 0)),
        min_p=pick("min_p", 0.0),
    )
