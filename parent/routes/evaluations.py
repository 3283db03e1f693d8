"""`/api/evaluations`: measure a model, as a job; and what was measured, with what it was before."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs.estimate import BASE_BYTES
from parent.jobs.evaluations import Evaluation, Evaluations
from parent.jobs.queue import JobQueue
from parent.library.adapters import parsed
from parent.library.fit import loaded_bytes, runs_wide
from parent.pool.pool import Pool
from shared import asgi
from shared.errors import ErrorCode, refuse
from shared.lab import Benchmark, Evaluate

MOST_BYTES = 64 * 1024
MOST, USUAL = 1000, 50
_SPECS: dict[str, type[Evaluate] | type[Benchmark]] = {"evaluate": Evaluate, "benchmark": Benchmark}
_OURS = ("url", "model_id", "type")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class EvaluationList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first."""

    ok: bool = True
    evaluations: list[Evaluation]


class EvaluateBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /api/evaluations`: what is common; the other fields are those of `Evaluate` and `Benchmark`, in names."""

    kind: Literal["evaluate", "benchmark"] = "evaluate"
    model: str = ""


class EvaluationRoutes:
    """The routes. `settings` gives those in force now."""

    def __init__(
        self, evaluations: Evaluations, queue: JobQueue, pool: Pool, settings: Callable[[], Settings]
    ) -> None:
        self.evaluations, self.queue, self.pool, self.settings = evaluations, queue, pool, settings

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`?model=`, `?kind=`, `?limit=`."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        limit = query.get("limit", [str(USUAL)])[-1]
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"limit must be 1 to {MOST}, not {limit[:40]!r}", param="limit"
            )
        found = await self.evaluations.find(
            model=query.get("model", [""])[-1], kind=query.get("kind", [""])[-1], limit=int(limit)
        )
        await asgi.respond(send, 200, msgspec.json.encode(EvaluationList(evaluations=found)))

    async def create(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`{"kind": "evaluate" | "benchmark", "model", …}` with the fields of `shared/lab.py`, in names. 202."""
        body = await read_json(receive, dict[str, Any], MOST_BYTES, silence_s=self.settings().request_wait_s)
        kind = body.pop("kind", "evaluate")
        if kind not in _SPECS:
            raise _bad("kind", f"must be {' or '.join(_SPECS)}, not {str(kind)[:80]!r}")
        struct = _SPECS[kind]
        names = {field.name for field in msgspec.structs.fields(struct)} - set(_OURS)
        if unknown := sorted(body.keys() - names):
            raise _bad(unknown[0][:80], f"is no field of {kind}; there is {', '.join(sorted(names))}")
        model = body.get("model", "")
        if not isinstance(model, str):
            raise _bad("model", "must be the name of a model")
        needs = await self._resolve(body, model) if kind == "evaluate" else 0
        try:
            spec = msgspec.convert(body, struct)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise _bad(where.rstrip("`") or "body", f"{what[:1].lower()}{what[1:]}") from None
        if kind == "benchmark" and model:
            await self.pool.roster.known(model)  # or it is refused now, not by the job
        job = await self.queue.submit(spec, needs=needs)
        answer = {"ok": True, "job_id": job.id, "job": self.queue.view(job)}
        await asgi.respond(send, 202, msgspec.json.encode(answer))

    async def _resolve(self, body: dict[str, Any], model: str) -> int:
        """Names of models, adapters and data sets to paths. -> bytes of memory for the models. Raises `Refused`."""
        roster = self.pool.roster
        choice = await roster.choose(model)
        if choice.entry.kind != "chat":
            raise _bad("model", f"is {choice.entry.id}, which writes nothing that could be measured")
        body["model"], body["model_id"] = str(choice.entry.path), choice.entry.id
        names = parsed(str(body["adapter"])) if body.get("adapter") else None
        adapters = await roster.adapters(choice, names)
        if len(adapters) > 1:
            raise _bad("adapter", "names several; fuse or merge them first")
        body["adapter"] = str(adapters[0].path) if adapters else ""
        entries = [choice.entry]
        if reference := body.get("reference"):
            entries.append((await roster.known(str(reference))).entry)
            body["reference"] = str(entries[-1].path)
        if data := body.get("data"):
            body["data"] = str(self._dataset(str(data)))
        return BASE_BYTES + sum(
            loaded_bytes(entry.dtypes, float32=runs_wide(entry, self.pool.device)) for entry in entries
        )

    def _dataset(self, name: str) -> Path:
        folder = self.settings().data_dir / "datasets" / name
        if not _NAME.fullmatch(name) or not folder.is_dir():
            raise _bad("data", f"{name[:80]!r} is no data set in {folder.parent}")
        return folder


def _bad(field: str, problem: str) -> Exception:
    return refuse(ErrorCode.INVALID_REQUEST, f"{field}: {problem}", param=field)
