"""One answer under way: what the engine gives of it, as text and events. On the event loop.

Each output is turned into text immediately and wakes the reader; what piles up while a reader is slow leaves as one
event.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from shared.wire import (
    Alternative,
    ChatPrompt,
    Event,
    Failed,
    Finish,
    FinishReason,
    GenerateRequest,
    Logprob,
    Prefill,
    Reasoning,
    Started,
    Text,
    Timings,
    Usage,
)
from worker.context import ModelContext
from worker.engine.engine import Output
from worker.engine.sequence import Sequence
from worker.text.reasoning import Kind, Piece, ReasoningSplitter, starts_open
from worker.text.stops import StopMatcher

if TYPE_CHECKING:
    from worker.engine.runner import Scores


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
        self._pieces: list[tuple[Kind, str, int]] = []  # and the number of ids when it came out
        self._ids: list[int] = []
        self._logprobs: list[Logprob] = []  # one for each of `_ids`, or none
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
            self._token(output.token, output.scores, is_eos=output.token in self.sequence.eos)
        if output.failure is not None:
            self._end(Failed(output.failure))
        elif self._stops.matched is not None:
            self._finish("stop")
        elif output.finish:
            self._finish(output.finish)
        if self._pieces or self._events:
            self._wake.set()
        return self._stops.matched is not None and output.finish is None and output.failure is None

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

    def _token(self, token: int, scores: "Scores | None" = None, *, is_eos: bool) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._num_completion += 1
        if self._splitter is not None:
            self._num_reasoning += self._splitter.in_reasoning
        if not is_eos:
            self._ids.append(token)
            if scores is not None:
                self._logprobs.append(self._told(token, scores))
            self._split(self._stops.feed(self._detokenizer.feed(token)))

    def _split(self, text: str) -> None:
        """Text that has passed the stop strings."""
        if text:
            self._add(self._splitter.feed(text) if self._splitter else [("text", text)])

    def _add(self, pieces: list[Piece]) -> None:
        self._pieces += [(kind, text, len(self._ids)) for kind, text in pieces if text]

    def _told(self, token: int, scores: "Scores") -> Logprob:
        spelled = self.context.detokenizers.spelled
        top = [Alternative(i, logprob, spelled(i)) for i, logprob in scores.top]
        return Logprob(token, scores.logprob, spelled(token), top)

    def _replay(self, ids: list[int]) -> None:
        """Rebuild the state of the parsers from the ids of an earlier worker; their text has left already."""
        for token in ids:
            self._token(token, is_eos=False)
        self._pieces.clear()
        self._ids.clear()
        self._first_at = None
        constraint = self.sequence.constraint
        if self._stops.matched is not None or (constraint is not None and constraint.is_complete):
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
            self._add(self._splitter.flush())
        now = time.monotonic()
        first = self._first_at or now
        self._end(
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

    def _end(self, last: Finish | Failed) -> None:
        self._flush_pieces()
        if self._ids and isinstance(last, Finish) and last.stop_sequence is None:  # of tokens without text
            kind = Reasoning if self._splitter is not None and self._splitter.in_reasoning else Text
            self._events.append(kind("", self._ids, self._logprobs))
        self._events.append(last)
        self.is_done = True
        self.ended.set()

    def _flush_pieces(self) -> None:
        """Pieces to events: neighbours of one kind are joined. Ids go with the last event; with an earlier one
        those before the first token of the next, if all of its own text came from them.
        """
        merged: list[tuple[Kind, list[str], int]] = []
        first: list[int] = []  # ids when the first piece of each came out
        for kind, text, count in self._pieces:
            if merged and merged[-1][0] == kind:
                merged[-1] = (kind, [*merged[-1][1], text], count)
            else:
                merged.append((kind, [text], count))
                first.append(count)
        self._pieces.clear()
        given = 0
        for place, (kind, texts, count) in enumerate(merged):
            upto = (
                len(self._ids) if place == len(merged) - 1 else count if count < first[place + 1] else given
            )
            self._events.append(
                (Text if kind == "text" else Reasoning)(
                    "".join(texts), self._ids[given:upto], self._logprobs[given:upto]
                )
            )
            given = upto
        if merged:
            self._ids, self._logprobs = [], []
