"""How far a text is the beginning of a JSON value (RFC 8259), character by character."""

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # what may stand in a string as it is
_WORDS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = "0123456789"
_NUMBER: dict[str, dict[str, str]] = {  # part of a number -> characters -> the part that they lead to
    "minus": {"0": "zero", "123456789": "whole"},
    "zero": {".": "point", "eE": "e"},
    "whole": {_DIGITS: "whole", ".": "point", "eE": "e"},
    "point": {_DIGITS: "fraction"},
    "fraction": {_DIGITS: "fraction", "eE": "e"},
    "e": {"+-": "sign", _DIGITS: "exponent"},
    "sign": {_DIGITS: "exponent"},
    "exponent": {_DIGITS: "exponent"},
}
_WHOLE_NUMBERS = frozenset({"zero", "whole", "fraction", "exponent"})


class JsonPrefix:
    """One value. `feed` says where the text stops being part of it; `is_done` once it is whole.

    A text that stops earlier than at its end, with the value not whole, is not JSON from there on.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._open: list[str] = []  # "{" and "[" around this place
        self._state = "value"
        self._word = ""  # what is left of true, false, null; or the digits of \\u

    def feed(self, text: str, at: int = 0) -> int:
        size = len(text)
        while at < size and not self.is_done:
            if self._state in ("string", "key string"):
                match = _PLAIN.match(text, at)
                assert match is not None
                at = match.end()
                if at == size:
                    return at
            if self._state in _NUMBER and not self._number(text[at]):
                if self._state not in _WHOLE_NUMBERS:
                    return at
                self._close()
                continue  # the character belongs to what is around the number
            elif self._state not in _NUMBER and not self._step(text[at]):
                return at
            at += 1
        return at

    def _number(self, char: str) -> bool:
        for chars, state in _NUMBER[self._state].items():
            if char in chars:
                self._state = state
                return True
        return False

    def _close(self) -> None:
        """A value is whole."""
        self._state = "next"
        self.is_done = not self._open

    def _step(self, char: str) -> bool:
        """Whether `char` may follow; numbers are not for here."""
        state = self._state
        if state in ("string", "key string"):
            if char == '"':
                self._close() if state == "string" else self._to("colon")
            elif char == "\\":
                self._state = f"{state} escape"
            else:
                return False
            return True
        if state.endswith("escape"):
            if char == "u":
                self._to(state.replace("escape", "hex"))
                self._word = "...."
            elif char in '"\\/bfnrt':
                self._to(state.removesuffix(" escape"))
            else:
                return False
            return True
        if state.endswith("hex"):
            self._word = self._word[1:]
            if not self._word:
                self._to(state.removesuffix(" hex"))
            return char in "0123456789abcdefABCDEF"
        if state == "word":
            good = char == self._word[0]
            self._word = self._word[1:]
            if not self._word:
                self._close()
            return good
        if char in " \t\r\n":
            return True
        return self._structure(char)

    def _structure(self, char: str) -> bool:
        state = self._state
        if state == "colon":
            self._to("value")
            return char == ":"
        if state in ("first key", "key"):
            if char == '"':
                self._to("key string")
                return True
            return char == "}" and state == "first key" and self._pop("{")
        if state == "next":
            if char == ",":
                self._to("key" if self._open[-1] == "{" else "value")
                return True
            return (char == "}" and self._pop("{")) or (char == "]" and self._pop("["))
        if char == "]":
            return state == "first value" and self._pop("[")
        return self._value(char)

    def _value(self, char: str) -> bool:
        if char == '"':
            self._to("string")
        elif char in "{[":
            self._open.append(char)
            self._to("first key" if char == "{" else "first value")
        elif char in _WORDS:
            self._to("word")
            self._word = _WORDS[char][1:]
        elif char == "-":
            self._to("minus")
        elif char in _DIGITS:
            self._to("zero" if char == "0" else "whole")
        else:
            return False
        return True

    def _pop(self, opened: str) -> bool:
        if self._open[-1] != opened:
            return False
        self._open.pop()
        self._close()
        return True

    def _to(self, state: str) -> None:
        self._state = state
