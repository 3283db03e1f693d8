"""Rows of a data set to token ids, written as the server would write them for the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.dataset import DataSet, Row
from shared.errors import ErrorCode, Refused, refuse
from shared.wire import ChatPrompt, Tool
from worker.text.conversation import render_chat
from worker.text.template import ChatTemplate, load_template
from worker.text.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Example:
    """A text of so many tokens; those from `response` on are what the model shall say."""

    tokens: list[int]
    response: int

    def cut(self, most: int) -> "Example":
        return self if len(self.tokens) <= most else Example(self.tokens[:most], self.response)

    def has_target(self, scope: str) -> bool:
        """Whether a token is left that the loss is over."""
        begin = max(1, self.response if scope == "response" else 1)
        return len(self.tokens) > begin


@dataclass(frozen=True)
class Facts:
    """What became of the rows. `cut`: longer than allowed. `dropped`: rows with nothing left to learn, and where."""

    rows: int
    tokens: int
    longest: int
    median: int
    cut: int
    dropped: list[str]


class Writer:
    """Writes rows for one model."""

    def __init__(self, model: Path) -> None:
        """Raises `Refused` (bad_checkpoint)."""
        self.tokenizer: TextTokenizer = load_tokenizer(model)
        self.template: ChatTemplate = load_template(model, self.tokenizer.config, self.tokenizer.special)

    def examples(self, row: Row, scope: str) -> list[Example]:
        """One of a row, or the chosen and the rejected one. Raises `Refused` that names the line."""
        data = row.data
        try:
            if "chosen" in data and "rejected" in data:
                return [self._answer(data["prompt"], data[key], data) for key in ("chosen", "rejected")]
            if "completion" in data:
                return [self._answer(data["prompt"], data["completion"], data)]
            if "messages" in data:
                return [self._chat(data["messages"], data, scope)]
            return [self._text(data["text"], scope)]
        except Refused as refused:
            at = f"{row.file}: line {row.line}: {refused.failure.message}"
            raise refuse(refused.failure.code, at, param="data") from None

    def _text(self, text: str, scope: str) -> Example:
        if scope == "response":
            raise refuse(ErrorCode.INVALID_REQUEST, "a text has no response; choose sft_scope full")
        return Example(self._ended(self.tokenizer.encode_text(text)), 0)

    def _chat(self, messages: list[dict[str, Any]], data: dict[str, Any], scope: str) -> Example:
        tokens = self._rendered(messages, data, prompt=False)
        if scope != "response":
            return Example(tokens, 0)
        if messages[-1].get("role") != "assistant":
            raise refuse(ErrorCode.INVALID_REQUEST, "the last message is not the assistant's")
        return Example(tokens, _common(self._rendered(messages[:-1], data, prompt=True), tokens))

    def _answer(self, prompt: Any, answer: Any, data: dict[str, Any]) -> Example:
        """A prompt and what is answered, as texts or as messages."""
        if not self.template.sources and isinstance(prompt, str) and isinstance(answer, str):
            before = self.tokenizer.encode_text(prompt)
            return Example(self._ended(before + self.tokenizer.encode_rendered(answer)), len(before))
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        tokens = self._rendered([*asked, *said], data, prompt=False)
        return Example(tokens, _common(self._rendered(asked, data, prompt=True), tokens))

    def _rendered(self, messages: list[dict[str, Any]], data: dict[str, Any], *, prompt: bool) -> list[int]:
        if not messages:
            return []
        chat = ChatPrompt(messages=messages, tools=_tools(data.get("tools") or []))
        return self.tokenizer.encode_rendered(render_chat(self.template, chat, add_generation_prompt=prompt))

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.eos_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def write_all(
    writer: Writer, rows: Sequence[Row], scope: str, most: int, on_row: Callable[[int], None]
) -> tuple[list[list[Example]], Facts]:
    """Examples of all rows, none longer than `most` tokens; rows of which nothing is left to learn are dropped."""
    kept: list[list[Example]] = []
    lengths: list[int] = []
    dropped: list[str] = []
    cut = 0
    for number, row in enumerate(rows, 1):
        on_row(number)
        whole = writer.examples(row, scope)
        short = [one.cut(most) for one in whole]
        cut += any(len(one.tokens) > most for one in whole)
        wanted = "response" if len(short) > 1 else scope
        if all(one.has_target(wanted) for one in short):
            kept.append(short)
            lengths.append(sum(len(one.tokens) for one in short))
        else:
            dropped.append(f"{row.file} {row.line}")
    lengths.sort()
    facts = Facts(
        rows=len(kept),
        tokens=sum(lengths),
        longest=max(lengths, default=0),
        median=lengths[len(lengths) // 2] if lengths else 0,
        cut=cut,
        dropped=dropped,
    )
    return kept, facts


def _tools(given: list[Any]) -> list[Tool]:
    """OpenAI's function objects, or what is inside of them."""
    inner = [one.get("function", one) if isinstance(one, dict) else one for one in given]
    try:
        return msgspec.convert(inner, list[Tool])
    except msgspec.ValidationError as error:
        raise refuse(ErrorCode.INVALID_REQUEST, f"tools are not as OpenAI has them: {error}") from None


def _common(before: list[int], tokens: list[int]) -> int:
    """How far `tokens` begin like `before`: the border may fall within a token."""
    count = 0
    for one, other in zip(before, tokens, strict=False):
        if one != other:
            break
        count += 1
    return count


def check_method(data: DataSet, method: str) -> None:
    """Raises `Refused` (invalid_request) where the format is of another method."""
    if (data.format == "preference") != (method != "sft"):
        have = ", ".join(("prompt, chosen and rejected",) if data.format == "preference" else (data.format,))
        want = "sft, or rows of" if method == "sft" else f"{method} needs rows of"
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"the data set's rows have {have}; "
            + (
                "choose method dpo or orpo for them"
                if data.format == "preference"
                else f"{want} prompt, chosen and rejected, or choose method sft"
            ),
            param="method",
        )
