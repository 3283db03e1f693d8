"""The tiny checkpoint that the suite asks: a context for tools in words, a template that thinks when told to."""

import json
from pathlib import Path

from tests.oracles.checkpoints import CHAT_TEMPLATE, write_case

CONTEXT = 4096
THINKS = (
    "{% if add_generation_prompt %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}"
)


def write_tiny(folder: Path) -> Path:
    """Write it; gives `folder`."""
    write_case("llama_tied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": CONTEXT}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + THINKS, encoding="utf-8")
    return folder
