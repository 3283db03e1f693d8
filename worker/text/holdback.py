"""How much of a text must be held back because a mark may be beginning there."""


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a true beginning of `mark` (0 = nothing to hold back)."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
