"""What a model on disk can do, as far as its small files tell; a worker that has loaded it knows better."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from parent.library.catalog import ModelEntry
from shared import wire
from shared.files import decode_json, read_regular

Ability = Literal["completion", "chat", "tools", "thinking", "vision", "audio", "embeddings", "rerank"]

_THINKS = re.compile(r"enable_thinking|<think>|thinking|reasoning_effort|reasoning_content")


class _Template(msgspec.Struct):
    """Of `tokenizer_config.json`; several named templates are a list."""

    chat_template: str | list[dict[str, str]] | None = None


def abilities(entry: ModelEntry, facts: wire.ModelFacts | None = None) -> list[Ability]:
    """In a fixed order. Reads the chat template of a model that is not loaded, once per change of it on disk.

    Images and sound in a checkpoint are no ability here: this server takes text only.
    """
    if entry.kind != "chat":
        return ["embeddings"] if entry.kind == "embedding" else ["rerank"]
    if facts is not None:
        found = (facts.has_chat_template, bool(facts.tools), facts.reasoning)
    else:
        template = _template(entry.path, entry.signature)
        found = (bool(template), "tools" in template, bool(_THINKS.search(template)))
    given: list[Ability] = ["completion"]
    names: tuple[Ability, ...] = ("chat", "tools", "thinking")
    return given + [name for name, is_there in zip(names, found, strict=True) if is_there]


@lru_cache(maxsize=512)
def _template(folder: Path, signature: str) -> str:
    """The text of the chat template; "" where there is none. `signature` is for the cache."""
    try:
        return read_regular(folder / "chat_template.jinja").decode("utf-8", "replace")
    except OSError:
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            found = decode_json(read_regular(folder / name), _Template).chat_template
        except (OSError, ValueError):
            continue
        if found:
            return found if isinstance(found, str) else "\n".join(each.get("template", "") for each in found)
    return ""
