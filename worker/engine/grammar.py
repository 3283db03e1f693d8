"""Answers that have to be sentences of a grammar: compiled once, matched token by token, a mask before each draw.

`llguidance` does the work; its tokenizer is built from the model's `tokenizer.json`. Whoever compiles does so off
the event loop and with a time limit (`COMPILE_S`): a grammar is somebody else's program.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from msgspec.structs import replace

from shared import wire
from shared.errors import ErrorCode, Refused, refuse
from worker.engine import answer_grammar
from worker.engine.answer_grammar import BadTool, Calls, Thinking
from worker.engine.budget import Budget
from worker.engine.schema import enforceable
from worker.text.tokenizer import TextTokenizer

COMPILE_S = 5.0
MAX_BYTES = 1 << 18
"""Of a grammar's text."""
MAX_KEPT = 32
"""Compiled grammars that are kept for the next request with the same."""

_OF_SCHEMA = "failed to compile JSON schema: "
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"

SPACE = r"(\r?\n)?[ \t]{0,32}"
"""Between the pieces of JSON: a line break and an indentation. A model may not go on with white space for ever."""

_LIMITS: Any = LLParserLimits(
    verbose_errors=False, max_items_in_row=10_000
)  # of its work per grammar and per token: the defaults bound it


class Constraint:
    """One row's place in its grammar (None: it has none) and in its budget for thinking. For one thread at a time."""

    def __init__(self, matcher: LLMatcher | None, size: int, budget: Budget | None = None) -> None:
        self.matcher = matcher
        self.size = size  # of the vocabulary it knows
        self.budget = budget

    def accept(self, token: int) -> None:
        """Move past a token that the mask let through."""
        if self.matcher is not None:
            self.matcher.consume_token(token)
        if self.budget is not None:
            self.budget.accept(token)

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self.matcher is not None and self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why it cannot go on, in one line; empty while it can."""
        matcher = self.matcher
        return _one_line(matcher.get_error()) if matcher is not None and matcher.is_error() else ""


def masks(constraints: Seq[Constraint], size: int) -> np.ndarray:
    """What each may go on with, bool [R, size]. A constraint that has failed lets only an end through."""
    known = constraints[0].size
    bits = np.full((len(constraints), -(-known // 32)), -1, np.int32)
    held = [(c.matcher, n) for n, c in enumerate(constraints) if c.matcher is not None]
    if len(held) == 1:
        [(matcher, place)] = held
        fill_next_token_bitmask(matcher, bits, place)
    elif held:
        fill_next_token_bitmask_par(_executor(), held, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=known, bitorder="little").view(np.bool_)
    for row, constraint in zip(allowed, constraints, strict=True):
        if constraint.budget is not None and constraint.budget.allowed is not None:
            _narrow(row, constraint.budget.allowed)
    if known < size:
        return np.pad(allowed, ((0, 0), (0, size - known)))
    return allowed[:, :size]


def _narrow(row: np.ndarray, ids: frozenset[int]) -> None:
    """Let only `ids` through, as far as the grammar does; where it lets none of them, it is right."""
    kept = [token for token in ids if token < len(row) and row[token]]
    if kept:
        row[:] = False
        row[kept] = True


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
        self,
        grammar: wire.Grammar | None,
        thinking: Thinking | None = None,
        resume: Seq[int] = (),
        calls: Calls | None = None,
        budget: Budget | None = None,
    ) -> Constraint:
        """A constraint past the ids of `resume`. Raises `Refused` (invalid_request). Slow: 1 ms to seconds."""
        mine = None
        if grammar is not None or calls is not None:
            mine = self._matcher(grammar, thinking, calls).deep_copy()
            if resume and not mine.consume_tokens(list(resume)):
                message = f"the ids so far do not fit the grammar: {_one_line(mine.get_error())}"
                raise refuse(ErrorCode.INVALID_REQUEST, message, param="resume")
        if budget is not None:
            for token in resume:
                budget.accept(token)
        return Constraint(mine, self._size, budget)

    def _matcher(
        self, grammar: wire.Grammar | None, thinking: Thinking | None, calls: Calls | None
    ) -> LLMatcher:
        """Of tools that are not strict the schema counts where it can be enforced; where not, any object will do."""
        answer = None if grammar is None else _inner(grammar)
        if calls is None:
            return self._made(answer, thinking, None)
        calls = calls._replace(
            tools=tuple(replace(tool, parameters=enforceable(tool.parameters)) for tool in calls.tools)
        )
        try:
            return self._made(answer, thinking, calls)
        except Refused:
            faults = {tool.name: self._fault(calls, tool) for tool in calls.tools}
            for tool in calls.tools:
                if faults[tool.name] and tool.strict:
                    raise _refused_tool(tool.name, faults[tool.name]) from None
            if not any(faults.values()):
                raise
        loose = (replace(tool, parameters={}) if faults[tool.name] else tool for tool in calls.tools)
        return self._made(answer, thinking, calls._replace(tools=tuple(loose)))

    def _made(
        self, answer: dict[str, Any] | None, thinking: Thinking | None, calls: Calls | None
    ) -> LLMatcher:
        """The matcher, compiled or kept. Raises `Refused`."""
        tokenizer = self._load()
        try:
            source = answer_grammar.source(partial(self._mark, tokenizer), answer, thinking, calls)
        except BadTool as bad:
            raise _refused_tool(bad.name, bad.reason) from bad
        _check_length(source, MAX_BYTES * 2)
        with self._lock:
            matcher = self._kept.get(source)
        if matcher is not None:
            return matcher
        matcher = _compiled(tokenizer, source)
        if matcher.is_error():
            raise _refused(_problem_of(matcher))
        with self._lock:
            self._kept[source] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _fault(self, calls: Calls, tool: wire.Tool) -> str:
        """Why the calls of this tool alone cannot be enforced; "" where they can."""
        tokenizer = self._load()
        alone = calls._replace(tools=(tool,), is_required=True)
        try:
            source = answer_grammar.source(partial(self._mark, tokenizer), None, None, alone)
        except BadTool as bad:
            return bad.reason
        matcher = _compiled(tokenizer, source)
        return _problem_of(matcher) if matcher.is_error() else ""

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

    def _mark(self, tokenizer: LLTokenizer, mark: str) -> str:
        """A mark that is one token outside of text, as Lark names it; "" = it is text."""
        token = self._text.core.token_to_id(mark)
        return f"<[{token}]>" if token is not None and tokenizer.is_special_token(token) else ""


def _compiled(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds a language without sentences
    return matcher


def _problem_of(matcher: LLMatcher) -> str:
    """In words about what was asked for: not where it stands in a grammar that was made of it here."""
    problem = matcher.get_error()
    if problem.startswith("NoExtension"):
        return "no text fits it"
    if _OF_SCHEMA in problem:
        problem = problem.partition(_OF_SCHEMA)[2].partition("\n   1 | ")[0]
    return problem.replace(_ONE_OF, "the branches of a oneOf must exclude each other; or use anyOf")


def _inner(grammar: wire.Grammar) -> dict[str, Any]:
    match grammar:
        case wire.JsonObject():
            return {"json_schema": _spaced({"type": "object"})}
        case wire.JsonSchema():
            _check_length(json.dumps(grammar.schema))
            return {"json_schema": _spaced(enforceable(grammar.schema))}
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
            pattern = "|".join(map(_literal, grammar.options))
            return dict(json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0])


def _spaced(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """The schema with a bound on white space; one that says itself how JSON is written stays as it is."""
    if schema is False:
        return False
    return {"x-guidance": {"whitespace_pattern": SPACE}} | ({} if schema is True else schema)


def _check_length(text: str, most: int = MAX_BYTES) -> str:
    size = len(text.encode())
    if size > most:
        raise _refused(f"its text has {size} bytes, and {most} are allowed; make it shorter")
    return text


def _literal(text: str) -> str:
    """The regular expression of this text alone."""
    return "".join(c if c.isalnum() and c.isascii() else rf"\x{{{ord(c):x}}}" for c in text)


def _refused(problem: str) -> Refused:
    message = f"the grammar cannot be enforced: {_one_line(problem)}"
    return refuse(ErrorCode.INVALID_REQUEST, message, param="grammar")


def _refused_tool(name: str, problem: str) -> Refused:
    message = f"the calls of tool {name!r} cannot be enforced: {_one_line(problem)}"
    return refuse(ErrorCode.INVALID_REQUEST, message, param="tools")


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


@cache
def _executor() -> LLExecutor:
    """The threads that fill the masks of several rows."""
    return LLExecutor()
