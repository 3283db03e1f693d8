"""Adapters of a loaded model: mounted and taken away between two steps, chosen row by row."""
