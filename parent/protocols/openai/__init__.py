"""OpenAI's chat and text completions, and embeddings. Pure."""
