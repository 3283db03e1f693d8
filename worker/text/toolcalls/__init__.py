"""Calls of tools in what a model writes: one format a module, `detect` finds a model's, `answer` reads them."""

import re

from worker.text.toolcalls.deepseek import DEEPSEEK, DEEPSEEK_FENCED
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.harmony import HARMONY
from worker.text.toolcalls.json_calls import JSON_TAGS, LLAMA_JSON, MISTRAL, MISTRAL_ARGS
from worker.text.toolcalls.literal_calls import GEMMA, LFM2, PYTHONIC
from worker.text.toolcalls.tag_calls import FUNCTION_TAGS, KEY_VALUE, NAMED_FUNCTION

# The first row whose texts are all in a template is the format of its model: what a model writes is what its
# template shows. Rows that say more come before those that say less.
TABLE: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<|tool_call>",), GEMMA),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=",), FUNCTION_TAGS),
    (("<function name=",), NAMED_FUNCTION),
    (("<arg_key>",), KEY_VALUE),
    (("<tool_call>",), JSON_TAGS),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("List of tools: [",), LFM2),
    (("func_name1(",), PYTHONIC),
    (("<|python_tag|>",), LLAMA_JSON),
    (("Environment: ipython",), LLAMA_JSON),
    (('"parameters": dictionary',), LLAMA_JSON),
)
FALLBACK = JSON_TAGS
"""Of a model whose template shows no calls; how to write them has to be said in its prompt."""


def detect(template: str) -> Format | None:
    """The format that a chat template speaks of; None: it has no word of tools."""
    for texts, form in TABLE:
        if all(text in template for text in texts):
            return form
    return FALLBACK if re.search(r"\btools\b", template) else None
