"""Text on the worker's side: tokenizer, chat template, detokenizer, stop strings, reasoning. No mlx here."""
