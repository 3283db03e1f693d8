"""Which texts go through an encoder together. Pure."""

from collections.abc import Sequence


def groups(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Places of texts of these lengths, group by group, the longest first.

    A group has at most `most` tokens once all of it is padded to its longest, or it is one text.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= most:
            found[-1].append(place)
        else:
            found.append([place])
    return found
