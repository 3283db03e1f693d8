"""Ollama's `/api`. Pure."""
