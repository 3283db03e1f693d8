"""What an answer is made of: whether it thinks and calls tools, in which formats, and where in it the prompt ends."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.errors import ErrorCode, refuse
from shared.wire import ChatPrompt, GenerateRequest, Grammar, Tool, ToolChoice
from worker.context import ModelContext
from worker.engine.answer_grammar import Calls, Thinking
from worker.engine.budget import Budget, closing
from worker.text.reasoning import ReasoningFormat, Start, start_of
from worker.text.toolcalls import FALLBACK
from worker.text.toolcalls.answer import AnswerParser
from worker.text.toolcalls.form import Format


@dataclass(frozen=True)
class Shape:
    """Of one answer. `form` is None where there are no tools, `thinking` where thinking is not told from text."""

    form: Format | None
    tools: tuple[Tool, ...]
    choice: ToolChoice
    thinking: ReasoningFormat | None
    start: Start
    splits_reasoning: bool = True

    @property
    def is_parsed(self) -> bool:
        return self.form is not None or self.thinking is not None

    @property
    def is_parallel(self) -> bool:
        return self.choice.parallel

    @cached_property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def marks(self) -> frozenset[str]:
        """What is read as text even where it is a token outside of text."""
        called = self.form.marks if self.form is not None else ()
        return frozenset((*called, *(self.thinking.marks if self.thinking is not None else ())))

    def enforced(self, grammar: Grammar | None = None) -> Calls | None:
        """The calls that a grammar has to know of; None: whatever the model writes is fine."""
        if self.form is None:
            return None
        is_required = self.choice.mode == "required"
        if not is_required and grammar is None and not any(tool.strict for tool in self.tools):
            return None
        wanted = tuple(tool for tool in self.tools if not is_required or self.choice.name in ("", tool.name))
        return Calls(self.form, wanted, is_required, self.choice.parallel)

    def thoughts(self) -> Thinking | None:
        """What may come before the answer proper."""
        form, is_open = self.thinking, self.start.thinking
        if form is None:
            return None
        if form.is_harmony:
            in_text = self.start.header is not None and not is_open
            return Thinking(form.open, form.close, bool(is_open), True, in_text)
        return None if is_open is False else Thinking(form.open, form.close, bool(is_open))

    def budget(self, context: ModelContext, limit: int | None) -> Budget | None:
        """A bound on what is thought."""
        if limit is None or self.thinking is None:
            return None
        parser = AnswerParser(None, {}, self.thinking, self.start)
        ends = closing(self.thinking, context.tokenizer, has_tools=bool(self.tools))
        return Budget(max(0, limit), parser, context.detokenizers.new(frozenset(self.thinking.marks)), ends)


PLAIN = Shape(None, (), ToolChoice(), None, Start(False, is_fresh=False))


def shape_of(context: ModelContext, request: GenerateRequest, rendered: str) -> Shape:
    """What the answer to a request is made of. Raises `Refused` where a choice of tools cannot be kept."""
    prompt = request.prompt
    tools = tuple(prompt.tools) if isinstance(prompt, ChatPrompt) else ()
    _check_choice(tools, request.tool_choice)
    if not isinstance(prompt, ChatPrompt):
        return PLAIN
    form = (context.calls or FALLBACK) if tools else None
    thinking = context.reasoning
    if thinking is not None and not thinking.is_harmony and not request.split_reasoning:
        thinking = None
    start = PLAIN.start
    if thinking is not None:
        final = prompt.messages[-1] if prompt.continue_final and prompt.messages else None
        start = start_of(rendered, thinking, final)
    return Shape(form, tools, request.tool_choice, thinking, start, request.split_reasoning)


def _check_choice(tools: tuple[Tool, ...], choice: ToolChoice) -> None:
    if choice.mode != "required":
        return
    if not tools:
        message = "tool_choice requires a call, and the request has no tools; send tools, or leave it out"
        raise refuse(ErrorCode.INVALID_REQUEST, message, param="tool_choice")
    if choice.name and choice.name not in {tool.name for tool in tools}:
        message = f"tool_choice names {choice.name!r}, which is not among the tools of the request"
        raise refuse(ErrorCode.INVALID_REQUEST, message, param="tool_choice")
