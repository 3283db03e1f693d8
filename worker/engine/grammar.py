"""Answers that have to be sentences of a grammar: compiled once, matched token by token, a mask before each draw.

`llguidance` does the work; its tokenizer is built from the model's `tokenizer.json`. Whoever compiles does so off
the event loop and with a time limit (`COMPILE_S`): a grammar is somebody else's program.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from shared import wire
from shared.errors import ErrorCode, Refused, refuse
from worker.text.tokenizer import TextTokenizer

COMPILE_S = 5.0
MAX_BYTES = 1 << 18
"""Of a grammar's text."""
MAX_KEPT = 32
"""Compiled grammars that are kept for the next request with the same."""

_LIMITS: Any = LLParserLimits(
    verbose_errors=False
)  # of its work per grammar and per token: the defaults bound it


class Thinking(NamedTuple):
    """The marks around thoughts that come before the answer; `is_open`: the prompt has opened them already."""

    open: str
    close: str
    is_open: bool


class Constraint:
    """One row's place in its grammar. Not safe for two threads at once."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self.matcher = matcher
        self.size = size  # of the vocabulary it knows

    def accept(self, token: int) -> None:
        """Move past a token that the mask let through."""
        self.matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why it cannot go on, in one line; empty while it can."""
        return _one_line(self.matcher.get_error()) if self.matcher.is_error() else ""


def masks(constraints: Seq[Constraint], size: int) -> np.ndarray:
    """What each may go on with, bool [R, size]. A constraint that has failed lets only an end through."""
    known = constraints[0].size
    bits = np.zeros((len(constraints), -(-known // 32)), np.int32)
    if len(constraints) == 1:
        fill_next_token_bitmask(constraints[0].matcher, bits)
    else:
        fill_next_token_bitmask_par(_executor(), [(c.matcher, n) for n, c in enumerate(constraints)], bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=known, bitorder="little").view(np.bool_)
    if known < size:
        return np.pad(allowed, ((0, 0), (0, size - known)))
    return allowed[:, :size]


class GrammarCompiler:
    """Of one model: its tokenizer, and the grammars that were asked for last. Built without work."""

    def __init__(self, tokenizer: TextTokenizer, eos: frozenset[int], size: int) -> None:
        """`size`: of the model's vocabulary, which may be larger than the tokenizer's."""
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._text = tokenizer
        self._eos = sorted(eos)
        self._size = max(size, tokenizer.vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(
        self, grammar: wire.Grammar, thinking: Thinking | None = None, resume: Seq[int] = ()
    ) -> Constraint:
        """A constraint past the ids of `resume`. Raises `Refused` (invalid_request). Slow: 1 ms to seconds."""
        tokenizer = self._load()
        source = self._source(grammar, thinking, tokenizer)
        with self._lock:
            matcher = self._kept.get(source)
        if matcher is None:
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds a language without sentences
            if matcher.is_error():
                problem = matcher.get_error()
                raise _refused("no text fits it" if problem.startswith("NoExtension") else problem)
            with self._lock:
                self._kept[source] = matcher
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        mine = matcher.deep_copy()
        if resume and not mine.consume_tokens(list(resume)):
            message = f"the ids so far do not fit the grammar: {_one_line(mine.get_error())}"
            raise refuse(ErrorCode.INVALID_REQUEST, message, param="resume")
        return Constraint(mine, self._size)

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    bare = LLTokenizer(
                        self._text.core.to_str(), n_vocab=self._size, eos_token=self._eos or None, slices=[]
                    )  # in two pieces, since neither lets other threads run meanwhile
                    self._tokenizer = bare.with_slices(LLTokenizer.general_slices())
                except Exception as error:  # ValueError, or whatever its Rust side panics with
                    message = (
                        f"a grammar cannot be enforced with this model's tokenizer: {_one_line(str(error))}"
                    )
                    raise refuse(ErrorCode.INVALID_REQUEST, message, param="grammar") from error
            return self._tokenizer

    def _source(self, grammar: wire.Grammar, thinking: Thinking | None, tokenizer: LLTokenizer) -> str:
        """In llguidance's own form: the answer as a grammar of its own, before it what is thought."""
        inner = {**_inner(grammar), "name": "answer"}
        if thinking is None:
            return json.dumps({"grammars": [inner]})
        close = self._mark(thinking.close, tokenizer)
        thought = (
            f"thought: /(?s:.*)/ {close}"
            if close
            else f"thought[suffix={_quoted(thinking.close)}]: /(?s:.*)/"
        )
        before = (
            "thought"
            if thinking.is_open
            else f"(/[ \\t\\r\\n]*/ {self._mark(thinking.open, tokenizer) or _quoted(thinking.open)} thought)?"
        )
        lark = f"start: {before} /[\\r\\n]*/ @answer\n{thought}"
        return json.dumps({"grammars": [{"lark_grammar": lark}, inner]})

    def _mark(self, mark: str, tokenizer: LLTokenizer) -> str:
        """A mark that is one token outside of text, as Lark names it; "" = it is text."""
        token = self._text.core.token_to_id(mark)
        return f"<[{token}]>" if token is not None and tokenizer.is_special_token(token) else ""


def _inner(grammar: wire.Grammar) -> dict[str, Any]:
    match grammar:
        case wire.JsonObject():
            return {"json_schema": {"type": "object"}}
        case wire.JsonSchema():
            _check_length(json.dumps(grammar.schema))
            return {"json_schema": grammar.schema}
        case wire.Regex():
            source = LLMatcher.grammar_from_regex(_check_length(grammar.pattern))
            found: dict[str, Any] = json.loads(source)["grammars"][0]
            return found
        case wire.ContextFree():
            try:
                text = any_to_lark(_check_length(grammar.text))
            except Exception as error:  # its own ValueError, or an IndexError on odd input
                raise _refused(str(error)) from error
            return {"lark_grammar": text}
        case wire.Choice():
            if not grammar.options:
                raise _refused("a choice needs one option or more")
            _check_length("".join(grammar.options))
            return {"lark_grammar": "start: " + " | ".join(map(_quoted, grammar.options))}


def _check_length(text: str) -> str:
    size = len(text.encode())
    if size > MAX_BYTES:
        raise _refused(f"its text has {size} bytes, and {MAX_BYTES} are allowed; make it shorter")
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refused(problem: str) -> Refused:
    message = f"the grammar cannot be enforced: {_one_line(problem)}"
    return refuse(ErrorCode.INVALID_REQUEST, message, param="grammar")


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


@cache
def _executor() -> LLExecutor:
    """The threads that fill the masks of several rows."""
    return LLExecutor()
