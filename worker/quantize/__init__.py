"""Quantizing a model: which weights get how many bits, and the files of the result."""
