"""Which protocol has which feature, and what checks it. `python -m tests.conformance.table` prints the page's matrix.

To add a feature: a row here, its check in `features.py` or `own_features.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tests.conformance import features as all_have
from tests.conformance import own_features as own
from tests.conformance.asking import Dialect, Server
from tests.conformance.dialects import DIALECTS

Check = Callable[[Server, Dialect], None]
Row = dict[str, Check]
"""Checks by column; a column that is not there: the protocol has no such thing."""


def of(check: Check, *columns: str) -> Row:
    """The same check for these columns, or for all of them."""
    return dict.fromkeys(columns or DIALECTS, check)


CHATS = ("chat", "responses", "anthropic", "ollama")
OPENAI = ("chat", "completions", "responses")

MATRIX: dict[str, Row] = {
    "plain text": of(all_have.plain_text),
    "system": of(all_have.system, *CHATS),
    "developer": of(all_have.developer, "chat", "responses"),
    "several turns": of(all_have.several_turns, *CHATS),
    "content in parts": of(all_have.parts, "chat", "responses", "anthropic"),
    "stop strings": of(all_have.stop_strings),
    "which stop string": of(all_have.which_stop, "anthropic"),
    "max tokens": of(all_have.max_tokens),
    "a seed repeats": of(all_have.seed_repeats),
    "temperature 0": of(all_have.temperature_0),
    "usage": of(all_have.usage),
    "logprobs": of(all_have.logprobs, *OPENAI, "ollama"),
    "top logprobs": of(all_have.top_logprobs, *OPENAI, "ollama"),
    "logit bias": of(all_have.logit_bias, *OPENAI, "anthropic"),
    "penalties": of(all_have.penalties),
    "several answers": of(all_have.several_answers, "chat", "completions"),
    "JSON object": of(all_have.json_object, *OPENAI, "ollama"),
    "JSON schema": of(all_have.json_schema),
    "regex and choice": of(all_have.regex_and_choice, "chat", "completions"),
    "tools auto": of(all_have.tools_auto, *CHATS),
    "tools required": of(all_have.tools_required, "chat", "responses", "anthropic"),
    "tool named": of(all_have.tools_named, "chat", "responses", "anthropic"),
    "tools none": of(all_have.tools_none, "chat", "responses", "anthropic"),
    "parallel calls off": of(all_have.parallel_off, "chat", "responses", "anthropic"),
    "tool results": of(all_have.tool_results, *CHATS),
    "thinking on": of(all_have.thinking_on, *CHATS),
    "thinking off": of(all_have.thinking_off, *CHATS),
    "thinking budget": of(all_have.thinking_budget, "chat", "responses", "anthropic"),
    "a begun answer": of(all_have.prefill, "chat", "anthropic", "ollama"),
    "token counting": {
        "chat": own.count_chat,
        "completions": own.count_text,
        "responses": own.count_responses,
        "anthropic": own.count_anthropic,
    },
    "echo": of(own.echo, "completions"),
    "token-array prompts": of(own.token_arrays, "completions"),
    "batch of prompts": of(own.batch, "completions"),
    "unknown field ignored": of(all_have.unknown_field),
    "class of a bad request": of(all_have.bad_request),
    "class of an unknown model": of(all_have.unknown_model),
    "class of a long prompt": of(all_have.context_exceeded),
    "models": of(own.models_openai, *OPENAI)
    | {"anthropic": own.models_anthropic, "ollama": own.models_ollama},
    "stored, read, deleted": of(own.store, "responses"),
    "input items": of(own.input_items, "responses"),
    "previous response": of(own.previous_response, "responses"),
    "background": of(own.background, "responses"),
    "cancel": of(own.cancel, "responses"),
    "apply-template": of(own.apply_template, "chat"),
    "tokenize, detokenize": of(own.tokenize, "completions"),
    "embeddings": of(own.embeddings_openai, "completions") | of(own.embeddings_ollama, "ollama"),
}


def cells() -> Iterator[tuple[str, str]]:
    """(feature, protocol) of every check."""
    for feature, row in MATRIX.items():
        yield from ((feature, column) for column in DIALECTS if column in row)


def begun(
    server: Server, some: Iterable[tuple[str, str]], at_once: int = 8
) -> dict[tuple[str, str], Future[None]]:
    """The checks of these cells, several at a time: their requests share the steps of the model."""
    pool = ThreadPoolExecutor(at_once)
    found = {cell: pool.submit(MATRIX[cell[0]][cell[1]], server, DIALECTS[cell[1]]) for cell in some}
    pool.shutdown(wait=False)
    return found


def markdown(shown: Callable[[str, str], str]) -> str:
    """The matrix, each cell as `shown` says; – where the protocol has no such thing."""
    lines = [
        f"| | {' | '.join(each.title for each in DIALECTS.values())} |",
        f"|---|{'---|' * len(DIALECTS)}",
    ]
    for feature, row in MATRIX.items():
        told = {column: shown(feature, column) for column in row}
        if any(told.values()):  # a row of which nothing was asked is left out
            lines.append(f"| {feature} | {' | '.join(told.get(column, '–') for column in DIALECTS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(lambda feature, column: "yes"))
