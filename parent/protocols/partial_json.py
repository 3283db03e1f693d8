"""The beginning of a JSON object, made whole: what stands there completely, and nothing of what does not. Pure."""

import re

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.DOTALL)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_CLOSES = {"{": "}", "[": "]"}


def closed(text: str) -> str:
    """The text up to its last complete value, with what is open closed.

    "{}" where it does not begin like an object. A number at the very end counts as complete, as in the SDKs of
    clients that read calls while they come.
    """
    good, ends, open_ends, awaits_value = 0, "{}", "", False
    read = 0
    for token in _TOKENS.finditer(text):
        if token.start() != read:  # a string without an end
            break
        word, read = token[0], token.end()
        if word in _CLOSES:
            if not open_ends and word == "[":
                break
            open_ends = _CLOSES[word] + open_ends
            awaits_value = word == "["
        elif word in ("}", "]"):
            if open_ends[:1] != word:
                break
            open_ends = open_ends[1:]
            awaits_value = False
        elif word == ":":
            awaits_value = True
            continue
        elif word == ",":
            awaits_value = open_ends[:1] == "]"
            continue
        elif word.isspace() or not awaits_value:  # a key
            continue
        elif word[0] != '"' and not _SCALAR.fullmatch(word):
            break
        else:
            awaits_value = False
        good, ends = read, open_ends
        if not open_ends:
            break
    return text[:good] + ends
