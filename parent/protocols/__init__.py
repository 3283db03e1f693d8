"""The public wire formats, pure: one file each, one line in this table."""

from parent.protocols.anthropic import request as anthropic
from parent.protocols.base import Protocol
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions

PROTOCOLS: tuple[Protocol, ...] = (openai_chat.PROTOCOL, openai_completions.PROTOCOL, anthropic.PROTOCOL)
