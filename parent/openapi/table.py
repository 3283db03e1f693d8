"""Every route of the server with what goes in and comes out; a test holds this table and that of `parent/app.py` equal.

Adding a route is one row here. `Object`: what is not described further.
"""

from typing import Any, Literal, NamedTuple

from parent.admin.pulls import Asked as PullAsked
from parent.admin.restart import RestartBody, RestartStatus
from parent.admin.storage import ExecuteBody, GcDone, GcPlan, TokenBody, TokenState
from parent.protocols import model_rows, rerank, text
from parent.protocols.anthropic import answer as anthropic_answer
from parent.protocols.anthropic import errors as anthropic_errors
from parent.protocols.anthropic import request as anthropic
from parent.protocols.ollama import answer as ollama_answer
from parent.protocols.ollama import embed as ollama_embed
from parent.protocols.ollama import errors as ollama_errors
from parent.protocols.ollama import models as ollama_models
from parent.protocols.ollama import request as ollama_request
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import chat_answer as openai_chat_answer
from parent.protocols.openai import completions as openai_completions
from parent.protocols.openai import embeddings as openai_embeddings
from parent.protocols.openai import fields as openai_fields
from parent.protocols.responses import decode as responses
from parent.protocols.responses import object as responses_object
from parent.protocols.responses import stored as responses_stored
from parent.routes import adapters
from parent.routes.datasets import TemplateList
from parent.routes.evaluations import EvaluateBody, EvaluationList
from parent.routes.models import LoadBody, UnloadBody
from parent.routes.push import PushBody, Pushed
from parent.routes.responses import Deleted, InputTokens

Object = dict[str, Any]
SSE, NDJSON, HTML = "text/event-stream", "application/x-ndjson", "text/html"
ERRORS: dict[str, Any] = {
    "openai": openai_fields.ErrorFrame,
    "anthropic": anthropic_errors.ErrorFrame,
    "ollama": ollama_errors.ErrorBody,
    "models": (openai_fields.ErrorFrame, anthropic_errors.ErrorFrame),
}


class Query(NamedTuple):
    """A parameter behind the path."""

    name: str
    type: str = "string"


class Operation(NamedTuple):
    """One route. `stream`: the media type of an answer that may come as a stream, beside the JSON of `answer`.

    `answer` None: something else than JSON; several types: one of them. `also`: further statuses with the same shape.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    tag: str
    summary: str
    answer: Any = Object
    body: Any = None
    stream: str = ""
    status: int = 200
    also: tuple[int, ...] = ()
    query: tuple[Query, ...] = ()
    errors: Literal["openai", "anthropic", "ollama", "models"] = "openai"
    needs_body: bool = True


def _ollama(path: str, summary: str, body: Any, answer: Any, stream: str = "") -> Operation:
    return Operation("POST", path, "ollama", summary, answer, body, stream, errors="ollama")


def _admin(
    method: Literal["GET", "POST", "PATCH", "DELETE"], path: str, summary: str, **more: Any
) -> Operation:
    return Operation(method, f"/admin/{path}", "admin", summary, **more)


def _push(kind: str, summary: str) -> Operation:
    return Operation("POST", f"/api/{kind}/push", "lab", summary, Pushed, PushBody, status=202)


_PAGE = (Query("limit", "integer"), Query("after_id"), Query("before_id"))
_ITEMS = (Query("order"), Query("limit", "integer"), Query("after"), Query("before"))
_EVENTS = (Query("stream", "boolean"), Query("starting_after", "integer"))
_RERANK: dict[str, Any] = {"body": rerank.RerankBody, "answer": rerank.Reranked}
_JOBS = (Query("limit", "integer"), Query("kind"), Query("state"))
_MEASURED = (Query("model"), Query("kind"), Query("limit", "integer"))
_LOG = (Query("limit", "integer"), Query("after", "integer"))
_REFUSED: dict[str, Any] = {"status": 501, "answer": ollama_errors.ErrorBody, "errors": "ollama"}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "openai",
        "An answer to messages",
        openai_chat_answer.Completion,
        openai_chat.ChatBody,
        SSE,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "openai",
        "The continuation of a text",
        openai_completions.TextCompletion,
        openai_completions.TextBody,
        SSE,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "openai",
        "An answer in the format of Responses",
        responses_object.Response,
        responses.ResponsesBody,
        SSE,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "openai",
        "How many tokens the prompt of such a request has",
        InputTokens,
        responses.ResponsesBody,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "openai",
        "A stored response",
        responses_object.Response,
        stream=SSE,
        query=_EVENTS,
    ),
    Operation("DELETE", "/v1/responses/{id}", "openai", "Forget it", Deleted),
    Operation(
        "POST", "/v1/responses/{id}/cancel", "openai", "End one in the background", responses_object.Response
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "openai",
        "The items that it was made of",
        responses_stored.ItemList,
        query=_ITEMS,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "openai",
        "Vectors of texts",
        openai_embeddings.Embeddings,
        openai_embeddings.EmbeddingsBody,
    ),
    Operation("POST", "/v1/rerank", "rerank", "Documents by how well they answer a query", **_RERANK),
    Operation("POST", "/v2/rerank", "rerank", "The same", **_RERANK),
    Operation("POST", "/rerank", "rerank", "The same", **_RERANK),
    Operation(
        "POST",
        "/v1/messages",
        "anthropic",
        "An answer in Anthropic's format",
        anthropic_answer.Message,
        anthropic.MessagesBody,
        SSE,
        errors="anthropic",
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic",
        "How many tokens the prompt of such a request has",
        anthropic.TokenCount,
        anthropic.MessagesBody,
        errors="anthropic",
    ),
    Operation("GET", "/v1", "models", "What there is under it", Object),
    Operation(
        "GET",
        "/v1/models",
        "models",
        "Every model that can be served",
        (model_rows.ModelList, model_rows.ModelPage),
        query=_PAGE,
        errors="models",
    ),
    Operation(
        "GET",
        "/v1/models/{id}",
        "models",
        "One model, by any of its names",
        (model_rows.ModelRow, model_rows.ModelInfo),
        errors="models",
    ),
    Operation(
        "POST",
        "/v1/models/{id}/load",
        "models",
        "Load it",
        model_rows.Moved,
        LoadBody,
        also=(202,),
        needs_body=False,
        errors="models",
    ),
    Operation(
        "POST",
        "/v1/models/{id}/unload",
        "models",
        "Let it go",
        model_rows.Moved,
        UnloadBody,
        also=(202,),
        needs_body=False,
        errors="models",
    ),
    Operation(
        "GET",
        "/v1/adapters",
        "adapters",
        "What is mounted, and what can be",
        adapters.AdapterList,
        query=(Query("model"),),
    ),
    Operation(
        "GET",
        "/v1/adapters/available",
        "adapters",
        "What is on disk",
        adapters.AvailableList,
        query=(Query("model"),),
    ),
    Operation("POST", "/v1/adapters/mount", "adapters", "Mount one", adapters.MountedRow, adapters.MountBody),
    Operation(
        "POST", "/v1/adapters/unmount", "adapters", "Let one go", adapters.Unmounted, adapters.UnmountBody
    ),
    Operation(
        "POST", "/api/finetune/merge", "adapters", "One out of two", adapters.Merged, adapters.MergeBody
    ),
    Operation(
        "POST",
        "/api/finetune/export",
        "adapters",
        "One as a folder to give away",
        adapters.Exported,
        adapters.ExportBody,
    ),
    _ollama(
        "/api/chat", "An answer in Ollama's format", ollama_request.ChatBody, ollama_answer.ChatFrame, NDJSON
    ),
    _ollama(
        "/api/generate",
        "An answer to one prompt",
        ollama_request.GenerateBody,
        ollama_answer.GenerateFrame,
        NDJSON,
    ),
    _ollama("/api/embed", "Vectors of texts", ollama_embed.EmbedBody, ollama_embed.Embedded),
    _ollama("/api/embeddings", "The vector of one text", ollama_embed.EmbeddingsBody, ollama_embed.Embedding),
    _ollama("/api/show", "One model", ollama_models.ShowBody, ollama_models.Show),
    _ollama(
        "/api/pull", "Fetch a model from the hub", ollama_models.PullBody, ollama_models.Progress, NDJSON
    ),
    Operation("GET", "/api/tags", "ollama", "Every model", ollama_models.Tags, errors="ollama"),
    Operation("GET", "/api/ps", "ollama", "The models in memory", ollama_models.Ps, errors="ollama"),
    Operation(
        "GET", "/api/version", "ollama", "Its version and ours", ollama_models.Version, errors="ollama"
    ),
    Operation("POST", "/api/create", "ollama", "Not here", **_REFUSED),
    Operation("POST", "/api/copy", "ollama", "Not here", **_REFUSED),
    Operation("POST", "/api/push", "ollama", "Not here", **_REFUSED),
    Operation("DELETE", "/api/delete", "ollama", "Not here", **_REFUSED),
    Operation(
        "POST", "/tokenize", "text", "The token ids of a text or of messages", text.Tokens, text.TokenizeBody
    ),
    Operation("POST", "/detokenize", "text", "The text of token ids", text.Content, text.DetokenizeBody),
    Operation(
        "POST", "/apply-template", "text", "The prompt that messages become", text.Applied, text.MessagesBody
    ),
    Operation("GET", "/health", "state", "200 while the server lives"),
    Operation("GET", "/ready", "state", "200 when the default model can answer", also=(503,)),
    Operation("GET", "/engine", "state", "All that is known"),
    Operation("GET", "/running", "state", "The models in memory or on their way"),
    Operation(
        "GET",
        "/stats",
        "state",
        "What the models in memory keep of prompts, and why prompts were found or not",
    ),
    Operation("GET", "/openapi.json", "state", "This document"),
    Operation("GET", "/", "page", "The chat page", None),
    Operation("GET", "/static/{name}", "page", "Its files", None),
    Operation("GET", "/api/dataset/templates", "lab", "The templates of data sets", TemplateList),
    _push("quantize", "A model that a job made, to the hub"),
    _push("finetune", "An adapter, to the hub"),
    _push("dataset", "A data set, to the hub"),
    Operation("GET", "/api/evaluations", "lab", "What was measured", EvaluationList, query=_MEASURED),
    Operation("POST", "/api/evaluations", "lab", "Measure a model", body=EvaluateBody, status=202),
    Operation("GET", "/api/settings/hf-token", "lab", "Whether there is a token for the hub", TokenState),
    Operation("POST", "/api/settings/hf-token", "lab", "Give one", TokenState, TokenBody),
    Operation("DELETE", "/api/settings/hf-token", "lab", "Forget it", TokenState),
    Operation("GET", "/api/gc/plan", "lab", "Superseded snapshots of the hub's cache", GcPlan),
    Operation("POST", "/api/gc/execute", "lab", "Delete them", GcDone, ExecuteBody),
    Operation("GET", "/api/jobs", "jobs", "Jobs of every kind, newest first", query=_JOBS),
    Operation("POST", "/api/jobs", "jobs", "Begin one of any kind", body=Object, status=202),
    Operation("GET", "/api/jobs/kinds", "jobs", "What can be begun, with the schema of each form"),
    Operation("GET", "/api/jobs/{id}", "jobs", "One job"),
    Operation("DELETE", "/api/jobs/{id}", "jobs", "Forget one that is over"),
    Operation("GET", "/api/jobs/{id}/log", "jobs", "What it told", query=_LOG),
    Operation("GET", "/api/jobs/{id}/metrics", "jobs", "What it measured", query=_LOG),
    Operation("GET", "/api/jobs/{id}/stream", "jobs", "What it tells, as it does", answer=None, stream=SSE),
    Operation("POST", "/api/jobs/{id}/cancel", "jobs", "End it", status=202),
    Operation("POST", "/api/jobs/{id}/pause", "jobs", "Stop it for a while", status=202),
    Operation("POST", "/api/jobs/{id}/resume", "jobs", "Go on", status=202),
    Operation("POST", "/api/jobs/{id}/retry", "jobs", "Begin one that failed once more", status=202),
    Operation("POST", "/api/jobs/{id}/pin", "jobs", "Keep it"),
    Operation("POST", "/api/jobs/{id}/unpin", "jobs", "Keep it as long as others"),
    Operation("POST", "/api/quantize/submit", "lab", "Quantize a model", body=Object),
    Operation("POST", "/api/finetune/submit", "lab", "Train an adapter", body=Object),
    Operation("POST", "/api/dataset/submit", "lab", "Build a data set", body=Object),
    _admin("POST", "workers/{id}/restart", "A new worker", status=202),
    _admin("POST", "workers/{id}/check", "Deep health", also=(503,)),
    _admin("GET", "workers/{id}/cache", "What is kept of prompts"),
    _admin("GET", "events", "Events as they happen", answer=None, stream=SSE),
    _admin("GET", "ledger", "The memory budget, account by account"),
    _admin("GET", "fit", "Whether a model fits", query=(Query("model"), Query("context", "integer"))),
    _admin("GET", "config", "The settings in force"),
    _admin("PATCH", "config", "Change settings while serving", body=Object),
    _admin("GET", "quarantine", "Requests that are refused"),
    _admin("DELETE", "quarantine/{hash}", "Let one run again"),
    _admin("GET", "pulls", "All pulls"),
    _admin("POST", "pulls", "Fetch a model from the hub", body=PullAsked, status=202),
    _admin("GET", "pulls/{id}", "One pull"),
    _admin("DELETE", "pulls/{id}", "Give it up", status=202),
    _admin("POST", "pulls/{id}/pause", "Stop it for a while", status=202),
    _admin("POST", "pulls/{id}/resume", "Go on", status=202),
    _admin("GET", "restart", "How the last restart went", answer=RestartStatus),
    _admin(
        "POST",
        "restart",
        "Become the program on disk",
        answer=RestartStatus,
        body=RestartBody,
        status=202,
        needs_body=False,
    ),
)
