"""One answer under way: what the engine gives of it, as text and events. On the event loop.

Each output is turned into text immediately and wakes the reader; what piles up while a reader is slow leaves as one
event.
"""

import asyncio
import time
from hashlib import blake2b
from typing import TYPE_CHECKING

from shared.errors import Failure
from shared.wire import (
    Alternative,
    Content,
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
    ToolCall,
    Usage,
)
from worker.context import ModelContext
from worker.engine.engine import Output
from worker.engine.sequence import Sequence
from worker.shape import Shape
from worker.text.stops import StopMatcher
from worker.text.toolcalls.answer import AnswerParser
from worker.text.toolcalls.reader import Piece

if TYPE_CHECKING:
    from worker.engine.runner import Scores


Kind = str | int
"""Of a piece of an answer: `text`, `reasoning`, or the number of a call."""


class Stream:
    """One answer under way: outputs of the engine in, events out.

    Text of the detokenizer is taken apart into thinking, text and calls; what a client is shown as text or thinking
    then passes the stop strings, calls do not.
    """

    def __init__(
        self,
        context: ModelContext,
        request: GenerateRequest,
        sequence: Sequence,
        rendered: str,
        shape: Shape,
        limit: int,  # of prompt and answer, in tokens
    ) -> None:
        self.sequence, self.serial = sequence, sequence.serial
        self.context = context
        self._limit = limit
        self._rendered = rendered
        self._prompt = rendered if request.echo else ""
        self._shape = shape
        self._detokenizer = context.detokenizers.new(shape.marks)
        self._stops = StopMatcher(request.stop) if request.stop else None
        self._stops_in: Kind = "text"  # what of the answer the stop strings are looking at
        self._parser = (
            AnswerParser(shape.form, shape.schemas, shape.thinking, shape.start) if shape.is_parsed else None
        )
        self._pieces: list[tuple[Kind, str, int]] = []  # and the number of ids when it came out
        self._calls: list[str] = []  # their names
        self._num_told = 0  # of them, how many have left with their names
        self._is_over = False  # a stop string, or the one call that was wanted: nothing more is given out
        self._ids: list[int] = []
        self._logprobs: list[Logprob] = []  # one for each of `_ids`, or none
        self._events: list[Event] = []
        self.reader = request.reader
        self.ended = asyncio.Event()
        self._wake = asyncio.Event()
        self._last: Kind = "text"  # of what left last, for tokens without text
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
        """Take one output of the engine. True: the engine should stop this sequence, its answer is over."""
        if self.is_done:
            return False
        if output.admitted:
            self._admitted_at = time.monotonic()
            self._start(output.reused)
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
        elif self._is_over:
            self._finish("stop")
        elif output.finish:
            self._finish(output.finish)
        if self._pieces or self._events:
            self._wake.set()
        return self._is_over and output.finish is None and output.failure is None

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

    def _start(self, reused: int) -> None:
        self._num_cached = min(reused, self.num_prompt)
        left = max(0, self._limit - len(self.sequence.prompt))
        self._events.append(Started(self.num_prompt, self._num_cached, left, self._prompt))

    def fail(self, failure: Failure) -> None:
        """End it here; what it holds is not given out."""
        if not self.is_done:
            self._pieces.clear()
            self._end(Failed(failure))
            self._wake.set()

    def _token(self, token: int, scores: "Scores | None" = None, *, is_eos: bool) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._num_completion += 1
        if self._parser is not None:
            self._num_reasoning += self._parser.in_reasoning
        if not is_eos:
            self._ids.append(token)
            if scores is not None:
                self._logprobs.append(self._told(token, scores))
            if text := self._detokenizer.feed(token):
                self._split(text)

    def _split(self, text: str) -> None:
        parser = self._parser
        if parser is None:
            self._say("text", text)
            return
        for piece in parser.feed(text):
            self._take(piece)
        if parser.is_plain:
            self._parser = None

    def _take(self, piece: Piece) -> None:
        """A piece of the answer; nothing comes after its end."""
        kind, text = piece
        if self._is_over:
            return
        if kind == "text" or kind == "reasoning":
            self._say(kind if self._shape.splits_reasoning else "text", text)
        elif kind == "call":
            self._flush_stops()
            self._calls.append(text)
            self._add(len(self._calls) - 1, "")
        elif kind == "arguments":
            self._add(len(self._calls) - 1, text)
        else:
            self._is_over = not self._shape.is_parallel

    def _say(self, kind: Kind, text: str) -> None:
        """What the client is shown, and stop strings are looked for in."""
        if self._stops is not None:
            if kind != self._stops_in:
                self._flush_stops()
                self._stops_in = kind
            text = self._stops.feed(text)
            self._is_over = self._stops.matched is not None
        if text:
            self._add(kind, text)

    def _flush_stops(self) -> None:
        """A stop string does not go on from thinking to text, or past a call."""
        if self._stops is not None and (text := self._stops.flush()):
            self._add(self._stops_in, text)

    def _add(self, kind: Kind, text: str) -> None:
        self._pieces.append((kind, text, len(self._ids)))

    def _told(self, token: int, scores: "Scores") -> Logprob:
        spelled = self.context.detokenizers.spelled
        top = [Alternative(i, logprob, spelled(i)) for i, logprob in scores.top]
        return Logprob(token, scores.logprob, spelled(token), top)

    def _replay(self, ids: list[int]) -> None:
        """Rebuild the state of the parsers from the ids of an earlier worker; their text has left already."""
        for token in ids:
            self._token(token, is_eos=False)
        self._pieces.clear()
        self._num_told = len(self._calls)
        self._ids.clear()
        self._first_at = None
        constraint = self.sequence.constraint
        is_complete = self._is_over or (constraint is not None and constraint.is_complete)
        if is_complete or len(ids) >= self.sequence.max_tokens:  # no engine will say that it has begun
            self._start(0)
            self._finish("stop" if is_complete else "length")
            self._wake.set()

    def _finish(self, reason: FinishReason) -> None:
        """What was held back comes out now; it may still complete a stop string."""
        if not self._is_over:
            self._split(self._detokenizer.flush())
            for piece in self._parser.flush() if self._parser is not None else ():
                self._take(piece)
        if not self._is_over:
            self._flush_stops()
        stop = self._stops.matched if self._stops is not None else None
        if self._is_over:
            reason = "stop"
        if reason == "stop" and self._calls and stop is None:
            reason = "tool_calls"
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
                stop,
            )
        )

    def _end(self, last: Finish | Failed) -> None:
        self._flush_pieces()
        if self._ids and isinstance(last, Finish) and last.stop_sequence is None:  # of tokens without text
            in_reasoning = self._parser is not None and self._parser.in_reasoning
            kind = "reasoning" if in_reasoning and self._shape.splits_reasoning else self._last
            self._events.append(self._event(kind, "", self._ids, self._logprobs))
        self._events.append(last)
        self.is_done = True
        self.ended.set()

    def _flush_pieces(self) -> None:
        """Pieces to events: neighbours of one kind are joined. Ids go with the last event; with an earlier one
        those before the first token of the next, if all of its own text came from them.
        """
        if len(self._pieces) == 1:  # nearly always
            kind, text, _ = self._pieces.pop()
            self._events.append(self._event(kind, text, self._ids, self._logprobs))
            self._ids, self._logprobs = [], []
            self._last = kind if kind != "reasoning" else "text"
            return
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
                self._event(kind, "".join(texts), self._ids[given:upto], self._logprobs[given:upto])
            )
            given = upto
        if merged:
            self._ids, self._logprobs = [], []
            self._last = merged[-1][0] if merged[-1][0] != "reasoning" else "text"

    def _event(self, kind: Kind, text: str, ids: list[int], logprobs: list[Logprob]) -> Content:
        if kind == "text":
            return Text(text, ids, logprobs)
        if kind == "reasoning":
            return Reasoning(text, ids, logprobs)
        assert isinstance(kind, int)
        if kind < self._num_told:
            return ToolCall(kind, text, ids=ids, logprobs=logprobs)
        self._num_told = kind + 1
        return ToolCall(kind, text, self._call_id(kind), self._calls[kind], ids, logprobs)

    def _call_id(self, index: int) -> str:
        """The same for a resumed request, another one for any other."""
        digest = blake2b(f"{self.sequence.seed} {index} {self._rendered}".encode(), digest_size=12)
        return f"call_{digest.hexdigest()}"
