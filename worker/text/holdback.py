"""How much of a text must be held back because a mark may be beginning there."""


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a true beginning of `mark` (0 = nothing to hold back)."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1)) if mark else -1
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
