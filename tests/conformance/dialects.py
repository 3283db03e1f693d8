"""The protocols, by the name of their column."""

from tests.conformance.asking import Dialect
from tests.conformance.dialect_anthropic import ANTHROPIC
from tests.conformance.dialect_ollama import OLLAMA
from tests.conformance.dialect_openai import CHAT, TEXT
from tests.conformance.dialect_responses import RESPONSES

DIALECTS: dict[str, Dialect] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "ollama": OLLAMA,
}
