"""A runnable fake worker: `python -m tests.fakes.worker --control-fd N --data-fd M`.

It speaks both channels as the real one does, needs no model, and commits the sins its script names. Every
token is a word chosen from (seed, prompt, position) alone, so an answer can be continued from any position.
What it did is written to `journal.ndjson` in the model directory, one object a line, for tests to wait on.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from shared import asgi, control, jobs, ndjson, wire
from shared.errors import ErrorCode, Failure
from shared.version import VERSION, WIRE
from tests.fakes import mounts, reading, real_job
from tests.fakes import script as scripts

WORDS = ("alpha", "beta", "gamma", "delta", "épsilon", "zeta", "eta", "theta", "λ", "mu", "東京", "xi", "pi")
_decode_order = msgspec.json.Decoder(control.ToWorker).decode
_decode_generate = msgspec.json.Decoder(wire.GenerateRequest).decode
_decode_render = msgspec.json.Decoder(wire.RenderRequest).decode


def prompt_text(prompt: wire.Prompt) -> str:
    """The prompt as the fake model sees it."""
    if isinstance(prompt, wire.TextPrompt):
        return prompt.text
    if isinstance(prompt, wire.TokenPrompt):
        return " ".join(map(str, prompt.ids))
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt.messages)


def token_at(text: str, seed: int, position: int) -> int:
    """The id of the token at this position, from (seed, prompt, position) alone."""
    digest = hashlib.blake2b(f"{seed}|{text}|{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % len(WORDS)


def expected_text(prompt: wire.Prompt, seed: int, count: int) -> str:
    """What `count` tokens say: the oracle of the tests."""
    text = prompt_text(prompt)
    return "".join(f"{WORDS[token_at(text, seed, position)]} " for position in range(count))


def call_pieces(calls: tuple[tuple[str, str], ...], request: wire.GenerateRequest) -> list[wire.ToolCall]:
    """What it calls of the tools that are offered, a token a piece: the name, then three characters at a time."""
    prompt, choice = request.prompt, request.tool_choice
    offered = {tool.name for tool in prompt.tools} if isinstance(prompt, wire.ChatPrompt) else set()
    names = {choice.name} if choice.name else offered
    made = [call for call in calls if call[0] in names]
    pieces = []
    for index, (name, arguments) in enumerate(made if choice.parallel else made[:1]):
        pieces.append(wire.ToolCall(index, id=f"call_{request.seed}_{index}", name=name))
        cut = [arguments[at : at + 3] for at in range(0, len(arguments), 3)]
        pieces += [wire.ToolCall(index, piece) for piece in cut]
    return pieces


def logprobs_of(ids: list[int], count: int | None) -> list[wire.Logprob]:
    """Likely enough: the token itself, then the first words there are."""
    if count is None:
        return []
    spelled = [f"{word} ".encode() for word in WORDS]
    top = [wire.Alternative(place, -1.0 - place, spelled[place]) for place in range(count)]
    return [wire.Logprob(token, -0.5, spelled[token], top) for token in ids]


class Cut(Exception):
    """Raised to close a connection in the middle of an answer."""


class Reader:
    """Who reads `/steps/NAME`: what has been said since it was last written to leaves as one frame."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, list[wire.Event]]] = []
        self._arrived = asyncio.Event()

    def take(self, name: str, event: wire.Event) -> None:
        self._parts.append((name, [event]))
        self._arrived.set()

    async def write(self, send: asgi.Send) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            parts, self._parts = self._parts, []
            await asgi.send_chunk(send, ndjson.encode(wire.StepFrame(parts)))


class Worker:
    """One fake process: its script, its channel, its counters."""

    def __init__(self, control_fd: int, data_fd: int, adopt_fd: int) -> None:
        self.control_fd = control_fd
        self.data_fd = data_fd
        self.adopt_fd = adopt_fd
        self.launch: control.LaunchModel | None = None
        self.ready: control.Ready | None = None
        self.base: dict[str, Any] = {}
        self.script = scripts.Script()
        self.model_path = ""
        self.spawns = 1
        self.stats = wire.WorkerStats()
        self.draining = False
        self.mounted: dict[str, wire.MountedAdapter] = {}
        self.readers: dict[str, Reader] = {}  # of /steps, by name
        self.moments: dict[int, asyncio.Event] = {}
        self.writer: asyncio.StreamWriter

    def say(self, message: control.FromWorker) -> None:
        if not self.writer.is_closing():  # a parent that is gone hears nothing
            self.writer.write(ndjson.encode(message))

    def journal(self, what: str, **fields: Any) -> None:
        if self.model_path:
            with open(Path(self.model_path) / "journal.ndjson", "ab") as file:
                file.write(ndjson.encode({"what": what, "pid": os.getpid(), **fields}))

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        early = scripts.for_request(scripts.load(""), "")
        channel: socket.socket | None = socket.socket(fileno=self.control_fd)
        reader, self.writer = await asyncio.open_unix_connection(sock=channel)
        if early.no_hello:
            await reader.read()
        self.say(control.Hello(wire=early.wire or WIRE, version=VERSION, pid=os.getpid()))
        while channel is not None:
            with contextlib.suppress(ConnectionError):  # its end, with words of ours unread
                await self._obey(reader)
            self.journal("parent gone")
            channel = await self._adopted()
            if channel is not None:
                reader, self.writer = await asyncio.open_unix_connection(sock=channel)
                self.draining = False
                self.journal("adopted")
                self._talk()
                self.say(control.Hello(wire=WIRE, version=VERSION, pid=os.getpid()))
                assert self.ready is not None
                self.say(self.ready)

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        """Do what a parent says until it is gone."""
        lines = ndjson.Lines()
        while chunk := await reader.read(65536):
            for line in lines.feed(chunk):
                order = _decode_order(line)
                if isinstance(order, control.LaunchModel):
                    self.launch = order
                    serving = asyncio.create_task(self._serve(order))
                    serving.add_done_callback(lambda _: os._exit(0))
                elif isinstance(order, control.LaunchJob):
                    await self._job(order, reader)
                elif isinstance(order, control.Drain) and not self.script.ignore_drain:
                    self.draining = True
                    self._report_drained()
                elif isinstance(order, control.Resize):
                    self.journal("resized", kv=order.kv_bytes, prefix=order.prefix_cache_bytes)
                elif isinstance(order, control.Shutdown) and not self.script.ignore_shutdown:
                    self.journal("shutdown")
                    os._exit(0)

    def _talk(self) -> None:
        for line in self.script.says:
            print(line, file=sys.stderr, flush=True)

    async def _adopted(self) -> socket.socket | None:
        """The channel of a new parent who knows the nonce, if one comes within the grace time."""
        if self.launch is None or self.ready is None or not self.launch.grace_s or self.adopt_fd < 0:
            return None
        listener = socket.socket(fileno=os.dup(self.adopt_fd))
        listener.setblocking(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.launch.grace_s):
                while True:
                    end, _ = await asyncio.get_running_loop().sock_accept(listener)
                    if self._is_right(end):
                        return end
                    end.close()
        return None

    def _is_right(self, end: socket.socket) -> bool:
        end.settimeout(2.0)
        try:
            said, fds, _, _ = socket.recv_fds(end, 4096, 4)
            order = _decode_order(said)
        except (OSError, msgspec.MsgspecError):
            return False
        assert self.launch is not None
        right = isinstance(order, control.Adopt) and order.nonce == self.launch.nonce
        for fd in fds:
            if right:
                os.dup2(fd, 1)
                os.dup2(fd, 2)
            os.close(fd)
        end.setblocking(False)
        return right

    async def _job(self, order: control.LaunchJob, reader: asyncio.StreamReader) -> None:
        real_job.work(order, self.control_fd, self.adopt_fd)  # and does not return, if it is one
        script = scripts.for_request(scripts.load(""), "")
        self.say(control.JobUpdate(jobs.JobStarted()))
        steps = order.spec.steps if isinstance(order.spec, jobs.NoopJob) else 1
        for step in range(steps):
            if script.crash_after == step:
                print("about to die", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if script.fatal:
                self.say(control.Fatal(Failure(ErrorCode(script.fatal), script.fatal_message)))
                os._exit(script.exit_code or 1)
            self.say(control.JobUpdate(jobs.JobStage(stage="count", done=step + 1, total=steps)))
            try:
                more = await asyncio.wait_for(reader.read(65536), script.ms_per_token / 1000 or 0.001)
            except TimeoutError:
                continue
            if not script.ignore_shutdown and (not more or b"cancel" in more):
                os._exit(0)
        self.say(control.JobUpdate(jobs.JobDone(output=order.output, summary=f"counted {steps}")))
        os._exit(0)

    async def _serve(self, launch: control.LaunchModel) -> None:
        self.model_path = launch.path
        self.base = scripts.load(launch.path)
        self.script = script = scripts.for_request(self.base, "")
        if script.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.spawns = self._count_spawn()
        self.journal("spawned", spawns=self.spawns, prefix=launch.prefix_cache_bytes)
        print(f"fake worker {os.getpid()} loads {launch.model_id}", file=sys.stderr, flush=True)
        self._talk()
        self.stats = wire.WorkerStats(active_bytes=script.footprint)
        self.ballast = b"x" * script.ballast
        if script.flood:
            threading.Thread(target=_flood, daemon=True).start()
        for _ in range(script.garbage_control):
            self.writer.write(b"no message\n")
        if script.exit_zero:
            await self.writer.drain()
            os._exit(0)
        if script.silent_load:
            await asyncio.Event().wait()
        for step in range(script.load_steps):
            self.say(control.Progress(stage="weights", done=step, total=script.load_steps))
            await asyncio.sleep(script.load_ms / 1000 / script.load_steps)
        if self.spawns <= script.crash_at_load:
            print("fake worker crashes while loading", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if script.fatal and script.fatal_with_rows in (0, launch.max_rows):
            self.say(control.Fatal(Failure(ErrorCode(script.fatal), script.fatal_message)))
            os._exit(script.exit_code or 3)
        facts = wire.ModelFacts(
            family="fake", context=4096, vocab_size=len(WORDS), eos_ids=[0], dtype="float32",
            weights_bytes=script.measured_bytes, device="cpu", blas="none", reasoning=script.reasoning > 0,
            defaults=wire.Sampling(temperature=1.0),
        )  # fmt: skip
        config = uvicorn.Config(
            self, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=3600
        )
        server = _Server(config)
        listener = socket.socket(fileno=self.data_fd)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        self.ready = control.Ready(facts, measured_bytes=script.measured_bytes)
        self.say(self.ready)
        if not script.mute:
            beats = asyncio.create_task(self._beat())
        await task
        if not script.mute:
            beats.cancel()

    def _count_spawn(self) -> int:
        """How many workers have served this model directory, this one included."""
        path = Path(self.model_path) / "spawns"
        with open(path, "ab") as file:
            file.write(b".")
        return path.stat().st_size

    async def _beat(self) -> None:
        while True:
            self.say(control.Heartbeat(self.stats))
            await asyncio.sleep(self.script.heartbeat_ms / 1000)

    def _count(self, **changes: int) -> None:
        self.stats = msgspec.structs.replace(
            self.stats, **{name: getattr(self.stats, name) + by for name, by in changes.items()}
        )

    def _report_drained(self) -> None:
        if self.draining and self.stats.active == 0:
            self.say(control.Drained())

    # ------------------------------------------------------------ data channel

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["path"] == "/stats":
            await asgi.respond(send, 200, msgspec.json.encode(self.stats))
            return
        body = await asgi.read_body(receive, ndjson.MAX_LINE)
        if scope["path"] == "/adapters":
            await mounts.answer(self.mounted, scope["method"], body, send, self.journal)
            return
        if scope["path"].startswith("/steps/"):
            name = scope["path"].removeprefix("/steps/")
            reader = self.readers[name] = Reader()
            try:
                await asgi.start(send, 200, [(b"content-type", b"application/x-ndjson")])
                await asgi.run_until_gone(receive, lambda: reader.write(send))
            finally:
                del self.readers[name]
            return
        if scope["path"] == "/render":
            text = prompt_text(_decode_render(body).prompt)
            result = wire.RenderResult(text, [token_at(text, 0, at) for at in range(len(text.split()))])
            await asgi.respond(send, 200, msgspec.json.encode(result))
            return
        if scope["path"] in ("/embed", "/rank"):
            if self.script.crash_after == 0 and self.spawns <= self.script.crash_times:
                os.kill(os.getpid(), signal.SIGKILL)
            await asgi.respond(send, 200, msgspec.json.encode(reading.answer(scope["path"], body)))
            return
        request = _decode_generate(body)
        try:
            script = scripts.for_request(self.base, prompt_text(request.prompt))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            failure = Failure(ErrorCode.INVALID_REQUEST, f"bad fake: directive: {error}")
            await asgi.respond(send, 400, msgspec.json.encode(failure))
            return
        if script.refuse:
            failure = Failure(ErrorCode(script.refuse), f"refused as told: {script.refuse}", "messages")
            await asgi.respond(send, 400, msgspec.json.encode(failure))
            return
        words = len(prompt_text(request.prompt).split())
        if 0 < script.context <= words:
            most = script.context - 1
            failure = Failure(ErrorCode.CONTEXT_EXCEEDED, "too long", tokens=words, most_tokens=most)
            await asgi.respond(send, 400, msgspec.json.encode(failure))
            return
        seen = {"resume": len(request.resume), "seed": request.seed, "adapters": request.adapters}
        self.journal("request", id=request.request_id, **seen)
        self._count(active=1)
        try:
            done = await asgi.run_until_gone(receive, lambda: self._generate(request, script, send))
            self.journal("finished" if done else "cancelled", id=request.request_id)
        finally:
            self._count(active=-1)
            self._report_drained()

    async def _step(self, length_s: float) -> None:
        """The next multiple of the step's length, the same moment for all streams: one engine, one step."""
        loop = asyncio.get_running_loop()
        number = int(loop.time() // length_s) + 1
        if number not in self.moments:
            self.moments = {number: asyncio.Event()}
            loop.call_at(number * length_s, self.moments[number].set)
        await self.moments[number].wait()

    async def _generate(self, request: wire.GenerateRequest, script: scripts.Script, send: asgi.Send) -> None:
        text = prompt_text(request.prompt)
        pieces = call_pieces(script.calls, request)
        natural = script.tokens + len(pieces)
        length = min(natural, request.max_tokens or natural)
        prompt_tokens = len(text.split())
        await asgi.start(send, 200, [(b"content-type", b"application/x-ndjson")])

        async def tell(event: wire.Event) -> None:
            if not request.reader:
                await asgi.send_chunk(send, ndjson.encode(event))
            elif request.reader in self.readers:
                self.readers[request.reader].take(request.request_id, event)
            else:
                raise Cut  # who asked is gone

        if script.queue_ms:
            await asyncio.sleep(script.queue_ms / 1000)
        echo = text if request.echo else ""
        await tell(wire.Started(prompt_tokens, 0, 4096 - prompt_tokens, echo))
        for chunk in range(script.prefill_chunks):
            await tell(wire.Prefill(chunk + 1, script.prefill_chunks))
        if script.prefill_ms:
            await asyncio.sleep(script.prefill_ms / 1000)

        def tokens(first: int, last: int) -> list[int]:
            return [token_at(text, request.seed, position) for position in range(first, last)]

        if request.resume != tokens(0, min(length, len(request.resume))):
            await tell(wire.Failed(Failure(ErrorCode.INTERNAL, "resume ids are not those of this request")))
            await asgi.send_chunk(send, b"", more=False)
            return
        sins_left = self.spawns <= script.crash_times
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number, (first, last) in enumerate(
            self._groups(len(request.resume), length, script.tokens_per_event)
        ):
            crashes = sins_left and (number == script.crash_after or first == script.crash_at)
            hangs = sins_left and script.hang_after <= number < script.hang_after + script.hang_times
            hangs = hangs and script.hang_after >= 0
            freezes = sins_left and number == script.freeze_after
            if crashes or hangs or freezes:
                for _ in range(20):  # turns of the loop in which what has been said leaves
                    await asyncio.sleep(0)
            if crashes:
                print("fake worker crashes as told", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if hangs:
                os.kill(os.getpid(), signal.SIGSTOP)
            if freezes:
                threading.Event().wait()  # the sin itself: the loop stands still
            if sins_left and number == script.stall_after:
                await asyncio.Event().wait()
            if number == script.hold_after:
                await self._released()
            if number == script.fail_after:
                await tell(wire.Failed(Failure(ErrorCode.ENGINE_FAULT, "the engine raised, as told")))
                await asgi.send_chunk(send, b"", more=False)
                return
            if number == script.cut_after and not request.resume:
                raise Cut
            if script.garbage:
                nonsense = wire.Text(msgspec.Raw(b"1"))  # type: ignore[arg-type]
                await tell(nonsense)
            if script.ms_per_token:
                step = script.ms_per_token / 1000
                if script.lockstep:
                    await self._step(step)
                else:
                    due += step
                    await asyncio.sleep(max(0.0, due - loop.time()))
            self._count(steps=1, tokens=last - first)
            ids = tokens(first, min(last, script.tokens))
            if ids:
                words = "".join(f"{WORDS[token]} " for token in ids)
                if script.stamp:
                    words = f"{time.monotonic_ns()} "
                kind = wire.Reasoning if first < script.reasoning else wire.Text
                await tell(kind(words, ids, logprobs_of(ids, request.logprobs)))
            for position in range(max(first, script.tokens), last):
                piece = pieces[position - script.tokens]
                await tell(msgspec.structs.replace(piece, ids=tokens(position, position + 1)))
            await asyncio.sleep(0)  # a fast model must not keep its own cancel waiting
        usage = wire.Usage(prompt_tokens, length, 0, min(script.reasoning, length))
        ended: wire.FinishReason = "tool_calls" if pieces else "stop"
        reason: wire.FinishReason = "length" if length < natural else ended
        await tell(wire.Finish(reason, usage))
        await asgi.send_chunk(send, b"", more=False)

    async def _released(self) -> None:
        """A test says so by a file."""
        while True:
            if (Path(self.model_path) / "release").exists():
                return
            await asyncio.sleep(0.01)

    @staticmethod
    def _groups(start: int, length: int, size: int) -> Iterator[tuple[int, int]]:
        for first in range(start, length, size):
            yield first, min(first + size, length)


class _Server(uvicorn.Server):
    """uvicorn that leaves the signals alone."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def _flood() -> None:
    while True:
        os.write(1, b"a line of a worker that has lost its mind\n" * 1000)


def main() -> None:
    """Run until told to leave, the parent is gone, or the script says to die."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--data-fd", type=int, required=True)
    parser.add_argument("--adopt-fd", type=int, default=-1)
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    uvloop.run(Worker(arguments.control_fd, arguments.data_fd, arguments.adopt_fd).run())
    os._exit(0)


if __name__ == "__main__":
    main()
