"""The grammar of a whole answer: what may be thought first, then a text of some form, or calls of tools, or either.

Written in llguidance's own form: a Lark grammar, which may name the grammar of the answer's text as `@answer`.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.wire import Tool
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.lark import ANY, Rules, Unwritable
from worker.text.toolcalls.wellformed import fault_of


class Thinking(NamedTuple):
    """The marks around thoughts that come before the answer; `is_open`: the prompt has opened them already.

    In harmony `is_open` says that a message of thoughts goes on, and `in_text` that one of text does.
    """

    open: str
    close: str
    is_open: bool
    is_harmony: bool = False
    in_text: bool = False


class Calls(NamedTuple):
    """The tools that an answer may call, or has to."""

    form: Format
    tools: tuple[Tool, ...]
    is_required: bool
    is_parallel: bool


class BadTool(Exception):
    """A tool whose calls cannot be held to its schema: its name, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


def source(
    special: Callable[[str], str],
    answer: dict[str, Any] | None,
    thinking: Thinking | None,
    calls: Calls | None,
) -> str:
    """llguidance's JSON. `special`: how Lark names the token of a mark, "" where a mark is text.

    `answer`: the grammar of the text, None = any text. Raises `BadTool`.
    """
    rules = Rules(special)
    if answer is not None:
        answer = {**answer, "name": "answer"}
    if thinking is None and calls is None:
        return json.dumps({"grammars": [answer]})
    text = "@answer" if answer is not None else ""
    if thinking is not None and thinking.is_harmony:
        start = _messages(rules, thinking, text, calls)
    else:
        before = _thought(rules, thinking) if thinking is not None else ""
        start = f"{before} ({_body(rules, text, calls)})"
    lark = "\n".join([f"start: {start}", *rules.lines])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *([answer] if answer is not None else [])]})


def _thought(rules: Rules, thinking: Thinking) -> str:
    """Nothing before the opening mark, and no endless lines after the closing one: both would count as text."""
    thought = f"{rules.rule(rules.upto(thinking.close))} /[\\r\\n]{{0,4}}/"
    return thought if thinking.is_open else f"({rules.mark(thinking.open)} {thought})?"


def _body(rules: Rules, text: str, calls: Calls | None) -> str:
    """What comes after the thoughts."""
    if calls is None:
        return text or f"/{ANY}/"
    form = calls.form
    units = _unit(rules, calls)
    lead = rules.text(form.lead) if form.bare else rules.mark(form.lead)
    several = f"{lead} {units}"
    if calls.is_parallel and not form.opening:
        between = f"{rules.text(form.between)}?" if form.between == "\n" else rules.text(form.between)
        several = f"{several} ({between} {lead} {units})*"
    if calls.is_required:
        return several
    if text:
        return f"{several} | {text}"
    if form.bare:
        return f"{several} | /[^\\{form.lead[0]}]{ANY}/"
    once = f"{rules.upto(form.lead)} {units}"
    return f"({once})* /{ANY}/" if calls.is_parallel else f"({once} | /{ANY}/)"


def _unit(rules: Rules, calls: Calls) -> str:
    """All of a call, or of a list of calls, after the lead."""
    form = calls.form
    each = []
    for tool in calls.tools:
        if fault := fault_of(tool.parameters):
            raise BadTool(tool.name, fault)
        try:
            each.append(rules.rule(form.write(rules, tool.name, tool.parameters)))
        except Unwritable as problem:
            raise BadTool(tool.name, str(problem)) from problem
    one = rules.rule(" | ".join(each))
    if not form.opening:
        return one
    several = f"{one} ({rules.text(form.comma)} {one})*" if calls.is_parallel else one
    around = [" ".join(rules.mark(mark) for mark in marks if mark) for marks in (form.opening, form.closing)]
    return f"{around[0]} {several} {around[1]}"


def _messages(rules: Rules, thinking: Thinking, text: str, calls: Calls | None) -> str:
    """Harmony: messages to oneself, then the answer's or a call's."""
    channel, message = rules.mark("<|channel|>"), rules.mark("<|message|>")
    begin = f'{rules.mark("<|start|>")} "assistant"'
    thought = rules.rule(f"{rules.upto('<|end|>')} {begin}")
    must_call = calls is not None and calls.is_required
    # Commentary is shown as text: it is no part of an answer that has a form.
    names = '"analysis"' if must_call or text else '("analysis" | "commentary")'
    aloud = f"{channel} {names} {message} {thought}"
    call = f"{channel} {_unit(rules, calls)}" if calls is not None else ""
    final = f'{channel} "final" {message} ({text or f"/{ANY}/"})'
    last = call if must_call else f"({call} | {final})" if call else final
    if thinking.in_text:
        if not call:
            return text or f"/{ANY}/"
        return f"{rules.mark('<|end|>')} {begin} ({aloud})* {last}"
    return f"{thought if thinking.is_open else ''} ({aloud})* {last}"
