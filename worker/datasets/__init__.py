"""Rows of a data set to tokens, and tokens to batches."""
