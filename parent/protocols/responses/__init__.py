"""OpenAI's Responses. Pure."""
