"""Anthropic's Messages. Pure."""
