"""Chat in the terminal, through the running server or one started for this chat.

  mlxd chat
  mlxd chat starter --system "Answer in one sentence."
  echo "What is the capital of France?" | mlxd chat

Ctrl-C stops an answer; /new begins again; /exit or Ctrl-D ends the chat.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from parent import keys
from parent.commands import options
from parent.commands.running import find_running
from parent.commands.terminal import is_interactive
from parent.config import Settings
from parent.library.catalog import folder_of
from shared.errors import ErrorCode, Refused, refuse

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=options.name, help="a name in `mlxd ls`, or a model folder"
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    parser.add_argument("--temperature", metavar="N", type=float, help="0 = always the likeliest word")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args, **({"model": args.model} if args.model else {}))
    running = find_running(settings.data_dir)
    key = keys.local_key(settings.data_dir)
    server = _connected(running.url) if running else _own_server(settings, args)
    with server as url, _client(url, key) as client:
        # A server of our own serves what was asked for, under the name it gives it.
        model = _model_name(client, args.model or "" if running else "")
        return _converse(client, model, args)


@contextmanager
def _connected(url: str) -> Iterator[str]:
    """A server that was there before stays."""
    yield url


@contextmanager
def _own_server(settings: Settings, args: argparse.Namespace) -> Iterator[str]:
    """One for this chat. The model is chosen here, where a question or the progress of a download is seen."""
    # Here: a chat with a running server never needs them.
    from parent.commands.choosing import choose_model
    from parent.commands.finding import library_of
    from parent.commands.session import session_server

    entry = choose_model(library_of(settings), settings, yes=False)
    with session_server(settings, settings.model or entry.id, args.config) as url:
        yield url


def _client(url: str, key: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # No read time-out: a long prompt on a slow machine is silent for minutes, and Ctrl-C is always there.
    try:
        timeout = httpx2.Timeout(None, connect=5.0)
        return httpx2.Client(base_url=url, trust_env=False, timeout=timeout, headers=headers)
    except httpx2.InvalidURL as error:
        raise _gone(url, error) from None


def _gone(url: object, error: Exception) -> Refused:
    return refuse(
        ErrorCode.ENGINE_UNAVAILABLE, f"the server at {url} does not answer: {error}; start it again"
    )


def _get(client: httpx2.Client, path: str) -> httpx2.Response:
    try:
        return client.get(path)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _gone(client.base_url, error) from None


def _model_name(client: httpx2.Client, wanted: str) -> str:
    """The name to ask for. Raises `Refused` when the server serves another model."""
    answer = _get(client, f"/v1/models/{quote(_utf8(wanted))}" if wanted else "/v1/models")
    if answer.status_code == 404:
        if served := _served_from(client, wanted):
            return served
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND, f"{_message(answer)} (asked the running server {client.base_url})"
        )
    if answer.is_error:
        raise refuse(ErrorCode.ENGINE_UNAVAILABLE, _message(answer))
    return wanted or str(answer.json()["data"][0]["id"])


def _served_from(client: httpx2.Client, wanted: str) -> str:
    """The id of the served model when `wanted` is the path of its folder, else ""."""
    folder = folder_of(wanted)
    if folder is None:
        return ""
    model = _get(client, "/engine").json().get("model") or {}
    same = Path(str(model.get("path", ""))).resolve() == folder.resolve()
    return str(model.get("id", "")) if same else ""


def _converse(client: httpx2.Client, model: str, args: argparse.Namespace) -> int:
    first = [{"role": "system", "content": _utf8(args.system)}] if args.system else []
    messages: list[dict[str, str]] = list(first)
    if is_interactive():
        print(f"{model}. Ctrl-C stops an answer, /new begins again, /exit ends.")
    failed = False
    for text in _questions():
        if text == "/new":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": _utf8(text)})
        request = {"model": model, "messages": messages, "stream": True}
        if args.temperature is not None:
            request["temperature"] = args.temperature
        try:
            messages.append({"role": "assistant", "content": _answer(client, request)})
        except Refused as refused:
            messages.pop()
            failed = True
            print(f"mlxd: {refused}", file=sys.stderr)
    return 1 if failed and not is_interactive() else 0


def _utf8(text: str) -> str:
    """Words of the command line that were not UTF-8 hold what JSON cannot."""
    return text.encode("utf-8", "replace").decode()


def _questions() -> Iterator[str]:
    """Lines of a person, or the whole of a pipe as one question."""
    if not sys.stdin.isatty():
        if text := sys.stdin.read().strip():
            yield text
        return
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text:
            yield text


def _answer(client: httpx2.Client, request: dict[str, Any]) -> str:
    """Print one answer as it comes; its text, also when it was stopped half-way."""
    parts: list[str] = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as answer:
            if answer.is_error:
                answer.read()
                raise refuse(ErrorCode.ENGINE_UNAVAILABLE, _message(answer))
            for kind, text in deltas(answer.iter_lines()):
                if kind == "text":
                    parts.append(text)
                    print(text, end="", flush=True)
                elif sys.stdout.isatty():
                    print(f"{_DIM}{text}{_PLAIN}", end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except httpx2.HTTPError as error:
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE, f"the server at {client.base_url} is gone: {error}"
        ) from None
    finally:
        print()
    return "".join(parts)


def deltas(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """("text" or "reasoning", piece) of each SSE frame. Raises `Refused` at an error frame."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        frame = msgspec.json.decode(data)
        if "error" in frame:
            raise refuse(ErrorCode.ENGINE_FAULT, frame["error"]["message"])
        for choice in frame.get("choices", []):
            delta = choice.get("delta", {})
            if delta.get("reasoning_content"):
                yield "reasoning", delta["reasoning_content"]
            if delta.get("content"):
                yield "text", delta["content"]


def _message(answer: httpx2.Response) -> str:
    """The one line of an error answer."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code}"
