"""How long steps take: for whoever has to tell a long one from one that hangs, and to share the time out. Pure."""

SHORT_CHUNK = 8
"""A prefill chunk below this part of a whole one says nothing about how long a whole one takes."""

LEAST = 32
"""Fewer prompt tokens a step are not worth a pass over the weights: on CPU 36 rows take as long as 20."""

SHARE = 0.7
"""Prefill may take this much of the time that decoding takes while rows decode: they keep 0.59 of their pace.

Where more rows wait in prefill than decode it is as many times more.
"""

_NEW = 0.3  # weight of the newest measurement


class Pace:
    """Told of every step that was waited for.

    `slowest_s` is the longest so far, a chunk of prefill counted as a whole one. The first step of each kind may
    compile and is left out. 0 until a chunk was measured: decoding alone says little about prefill.
    """

    def __init__(self) -> None:
        self.slowest_s = 0.0
        self._slowest_decode_s = 0.0
        self._decoded = self._prefilled = False
        self._decode_s = 0.0  # a step without prefill
        self._token_s = 0.0  # what a prompt token adds to a step
        self._share = SHARE
        self._owed_s = 0.0  # by prefill to the rows that decode; below 0: by them, of one step at most

    def step(self, took_s: float, num_prefill: int, chunk: int, *, decoded: bool = False) -> None:
        """A step was waited for; `num_prefill` of a chunk's tokens were in it, and rows that decode if `decoded`."""
        if num_prefill == 0:
            if self._decoded:
                self._slowest_decode_s = max(self._slowest_decode_s, took_s)
                self._decode_s = _mixed(self._decode_s, took_s)
            self._decoded = True
            self._pay(took_s * self._share)
        else:
            if num_prefill * SHORT_CHUNK >= chunk:
                if self._prefilled:
                    self.slowest_s = max(self.slowest_s, took_s * max(1.0, chunk / num_prefill))
                self._prefilled = True
            extra_s = max(0.0, took_s - self._decode_s) if decoded else took_s
            self._token_s = _mixed(self._token_s, extra_s / num_prefill)
            if decoded:
                self._pay(self._decode_s * self._share - extra_s)
            else:
                self._owed_s = 0.0
        if self.slowest_s:
            self.slowest_s = max(self.slowest_s, self._slowest_decode_s)

    def budget(self, chunk: int, decoding: int = 1, prefilling: int = 1) -> int:
        """Prompt tokens that the next step may have while so many rows decode and others are in prefill, at most
        `chunk`; 0: it is the turn of those that decode alone.
        """
        self._share = SHARE * max(1.0, prefilling / decoding)
        least = min(LEAST, chunk)
        if not self._decode_s or not self._token_s:
            return 0 if self._owed_s > 0 else max(least, chunk // SHORT_CHUNK)
        count = int((self._decode_s * self._share - self._owed_s) / self._token_s)
        if count < least and self._owed_s > 0:
            return 0
        return max(least, min(chunk, count))

    def _pay(self, seconds: float) -> None:
        self._owed_s = max(self._owed_s - seconds, -self._decode_s * self._share)


def _mixed(old: float, new: float) -> float:
    return new if not old else old + (new - old) * _NEW
