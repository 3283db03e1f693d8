"""Texts to measure on, cut into pieces of tokens: those that come along, or a file of text or JSONL.

`calibration.txt` is what quantizing looks at, `held_out.txt` what its result is measured on; they have nothing in
common. Both were written for this project, but for passages that are in the public domain.
"""

from pathlib import Path
from typing import Literal

from shared.dataset import read_rows
from shared.errors import ErrorCode, Refused, refuse
from shared.files import read_regular
from worker.datasets.examples import Writer

Own = Literal["calibration", "held_out"]


def pieces(model: Path, file: str, own: Own, count: int, length: int, *, param: str) -> list[list[int]]:
    """At most `count` pieces of at most `length` token ids, from all over the text; each begins as texts begin.

    `file` "": the text `own`. A name that ends in .jsonl is read as rows of a data set, and anything else as a text.
    Raises `Refused` (invalid_request) that names `param`, where there is no text or a line is broken.
    """
    writer = Writer(model)
    begin = [token for token in [writer.tokenizer.bos_id] if token is not None]
    tokens = _tokens(writer, Path(file) if file else Path(__file__).with_name(f"{own}.txt"), param)
    if tokens[:1] != begin:
        begin = []
    tokens = tokens[len(begin) :]
    room = length - len(begin)
    cut = [begin + tokens[at : at + room] for at in range(0, len(tokens), room)]
    if len(cut) > 1 and len(cut[-1]) < length // 2:
        cut.pop()
    if len(cut[-1] if cut else []) < 2:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{file}: there is no text in it", param=param)
    if len(cut) <= count:
        return cut
    return [cut[place * len(cut) // count] for place in range(count)]


def _tokens(writer: Writer, file: Path, param: str) -> list[int]:
    if file.suffix != ".jsonl":
        return writer.tokenizer.encode_text(text_of(file, param))
    try:
        rows = read_rows(file)
        found: list[int] = []
        for row in rows:
            found += writer.examples(row, "full")[0].tokens
    except Refused as refused:
        raise refuse(refused.failure.code, refused.failure.message, param=param) from None
    return found


def text_of(file: Path, param: str) -> str:
    """What a file of text says. Raises `Refused` (invalid_request) that names `param`."""
    try:
        text = read_regular(file).decode()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{file}: {reason}; choose another file", param=param
        ) from None
    except UnicodeDecodeError as error:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"{file}: is no UTF-8 text (byte {error.start}); convert it",
            param=param,
        ) from None
    if not text.strip():
        raise refuse(ErrorCode.INVALID_REQUEST, f"{file}: there is no text in it", param=param)
    return text
