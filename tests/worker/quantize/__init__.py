"""Quantizing: the numbers, the bytes, and the job as a whole."""
