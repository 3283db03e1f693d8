"""The public wire formats, pure: one file each, one line in this table."""

from parent.protocols import anthropic, openai_chat, openai_completions
from parent.protocols.base import Protocol

PROTOCOLS: tuple[Protocol, ...] = (openai_chat.PROTOCOL, openai_completions.PROTOCOL, anthropic.PROTOCOL)
