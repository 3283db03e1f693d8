"""Bytes and durations as people write them: `24GB`, `1.5 GiB`, `75%`, `5m`, `-1`."""

import re

_BYTES = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z%]*)\s*")


def parse_bytes(text: str, *, of: int | None = None) -> int:
    """`24GB` to 24000000000; `75%` needs `of`, the whole. Raises ValueError with what was wrong."""
    match = _NUMBER.fullmatch(text)
    if not match or float(match[1]) < 0:
        raise ValueError(f"{text!r} is not a size; write for example 24GB, 512MiB or 75%")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if of is None:
            raise ValueError(f"{text!r}: a percentage has no meaning here; write a size such as 24GB")
        return int(of * number / 100)
    if unit not in _BYTES:
        raise ValueError(f"{text!r}: unknown unit {match[2]!r}; write for example 24GB, 512MiB or 75%")
    return int(number * _BYTES[unit])


def parse_seconds(text: str) -> float | None:
    """`5m` to 300.0; `-1` to None, which means never. Raises ValueError with what was wrong."""
    match = _NUMBER.fullmatch(text)
    if not match or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text[:40]!r} is not a duration; write for example 30s, 5m, 2h or -1 for never")
    number = float(match[1])
    return None if number < 0 else number * _SECONDS[match[2].lower()]


def format_bytes(count: int) -> str:
    """Decimal units, three digits: 538 MB, 1.23 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """250ms, 1.5s, 4m 10s, 2h 5m."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m"
