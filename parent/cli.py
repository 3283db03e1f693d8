"""The command line: the table of verbs, strict parsing, and one way for errors to end.

Exit codes: 0 done, 1 it failed, 2 the command or a setting is wrong. An error is one line on stderr. Each
verb's module is imported only when that verb is asked for, so that a plain command starts quickly.
"""

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from typing import Any, NoReturn

from shared.errors import ErrorCode, Refused
from shared.version import VERSION

# verb -> (module under parent.commands, one line of help). Each module has `arguments(parser)` and
# `run(args) -> int`; its docstring is the text of `mlxd VERB --help`.
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("serve", "serve a model, the API and the chat page"),
    "restart": ("restart", "restart the running server without losing a request or a loaded model"),
    "chat": ("chat", "chat in the terminal"),
    "launch": ("launch", "start Claude Code, Codex or opencode on the running server"),
    "pull": ("pull", "fetch a model: the starter, or one of the hub"),
    "import": ("import_gguf", "convert a GGUF file into a model of the library"),
    "ls": ("ls", "list the models"),
    "ps": ("ps", "show the models in memory"),
    "load": ("load", "load a model into the running server"),
    "unload": ("unload", "let a model of the running server go"),
    "rm": ("rm", "delete a model"),
    "adapters": ("adapters", "list adapters, or delete one"),
    "fuse": ("fuse", "add adapters to the weights of a model"),
    "keys": ("keys", "say who may ask: add, list or remove keys"),
    "eval": ("eval", "measure a model: perplexity, KL against another one, tasks"),
    "bench": ("bench", "measure how fast the running server answers"),
    "jobs": ("jobs", "list the jobs of the running server, follow, pause or cancel one"),
    "quantize": ("quantize", "quantize a model to a new one"),
    "finetune": ("finetune", "train an adapter on a model"),
    "dataset": ("dataset", "build a data set by a template"),
    "fit": ("fit", "say whether a model fits in memory, with the arithmetic"),
    "config": ("config", "show the settings and where each comes from"),
    "doctor": ("doctor", "check this machine and say what to do"),
    "version": ("version", "print the version"),
}

PASSING_ON = ("launch",)
"""Verbs that start another program: what stands after `--` is for that one."""

_EPILOG = """\
A first chat:
  mlxd serve              fetches a small model if there is none, and opens the chat page
  mlxd chat               the same in the terminal

Every setting is a flag of `mlxd serve`, a variable MLXD_*, or a line of mlxd.toml; see `mlxd config show`.
"""


class Parser(argparse.ArgumentParser):
    """argparse, strict: no abbreviated flags, and an error is one line with a near match."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        if choice := re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose", message):
            message = f"there is no command {choice[1]!r}{_near(choice[1], list(VERBS))}"
        self.exit(2, f"mlxd: {message}; see `{self.prog} --help`\n")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code. Never raises but for `SystemExit` of --help and usage errors."""
    words = sys.argv[1:] if argv is None else argv
    forgive_encodings()
    try:
        args = _parse(words)
        return int(args.run(args))
    except Refused as refused:
        print(f"mlxd: {refused.failure.message}", file=sys.stderr)
        return 2 if refused.failure.code == ErrorCode.INVALID_REQUEST else 1
    except KeyboardInterrupt:
        print("mlxd: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mlxd ls | head -1`; stdout is gone, and so must be its flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal went away under us: nobody is left to read a word
            return _fault(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # a bug of ours: still one line, unless somebody looks for it
        return _fault(error)


def _fault(error: Exception) -> int:
    if os.environ.get("MLXD_LOG_LEVEL") == "debug":
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"mlxd: a fault of mlxd: {what} (MLXD_LOG_LEVEL=debug shows where)", file=sys.stderr)
    return 1


def forgive_encodings() -> None:
    """What cannot be decoded or shown becomes a question mark, in every command: text of people and models is
    not ours to be strict about.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _parse(words: list[str]) -> argparse.Namespace:
    words = _options_last(words)
    verb = next((word for word in words if not word.startswith("-")), "")
    words, passed_on = _cut(words) if verb in PASSING_ON else (words, [])
    parser, chosen = build_parser(verb)
    args, unknown = parser.parse_known_args(words)
    args.passed_on = passed_on
    if unknown:
        speaker = chosen or parser
        speaker.error(f"unrecognized argument {unknown[0]}{_near(unknown[0].split('=')[0], speaker.flags())}")
    if not hasattr(args, "run"):
        parser.print_help()
        raise SystemExit(2)
    return args


def _cut(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _options_last(words: list[str]) -> list[str]:
    """`mlxd --config x ls` as `mlxd ls --config x`: a setting may stand before the command."""
    if not words or not words[0].startswith("--") or words[0] in ("--", "--help", "--version"):
        return words
    from parent.config import (
        fields,  # here: a command line that begins with its command needs no look at them
    )

    taking_a_value = {"--config", *(flag for known in fields().values() for flag in known.flags)}
    early, rest = [], list(words)
    while rest and rest[0].startswith("-"):
        flag, equals, _ = rest[0].partition("=")
        if flag not in taking_a_value:
            break
        taken = 1 if equals else 2
        early += rest[:taken]
        rest = rest[taken:]
    parser, _ = build_parser("")
    if rest and rest[0].startswith("-"):
        wrong = rest[0].split("=")[0]
        parser.error(f"write options after the command, as in `mlxd COMMAND {wrong}`")
    if not rest:
        parser.error(f"there is no command after {' '.join(early)}")
    return [rest[0], *early, *rest[1:]]


def build_parser(verb: str) -> tuple[Parser, Parser | None]:
    """The parser of everything, and that of `verb`, the only one whose own arguments are filled in."""
    parser = Parser(
        prog="mlxd", description="Serve language models with MLX, and survive their crashes.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"mlxd {VERSION}")
    verbs = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)
    chosen = None
    for name, (module, summary) in VERBS.items():
        sub = verbs.add_parser(name, help=summary)
        if name == verb:
            command = importlib.import_module(f"parent.commands.{module}")
            sub.description = command.__doc__
            command.arguments(sub)
            sub.set_defaults(run=command.run)
            chosen = sub
    return parser, chosen


def _near(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {match[0]}?" if match else ""
